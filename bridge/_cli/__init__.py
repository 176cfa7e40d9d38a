"""The command line `swa`.

Needs the extra ``cli`` (typer, rich; matplotlib for plots). Commands import torch or JAX only when they decode or
look for a GPU, so that all of them work with either alone, and ``swa plan`` and ``swa doctor`` with neither.
``--json`` prints one object on stdout and everything else on stderr; only ``swa bench --json FILE`` writes a file.
Exit codes are 0, 1 for a check that missed its limit, 2 for wrong usage.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run `swa`."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"swa needs {' and '.join(missing)}: pip install 'swa-decode[cli]'\n")
        raise SystemExit(2)
    from bridge._cli._app import app

    app(prog_name="swa")
