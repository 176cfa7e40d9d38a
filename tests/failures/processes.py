"""Interpreters in which some packages are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_without(absent: tuple[str, ...], script: str, folder: Path, **environment: str) -> str:
    """Run ``script`` in an interpreter whose site-packages lack some top-level packages; return its stdout."""
    for kind in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(kind).iterdir():
            lacks = entry.name.partition("-")[0].partition(".")[0] in absent
            if not lacks and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    search = os.pathsep.join((str(ROOT), str(folder)))
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**inherited, "PYTHONPATH": search, **environment}, capture_output=True, text=True, timeout=120, cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
