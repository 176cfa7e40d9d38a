"""Importing one package must not drag in a framework that it does not need, nor fail where one is absent.

Each case runs in a fresh interpreter, because modules that this process has imported would hide the answer.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

FOREIGN = {
    "swa_plan": ("torch", "jax", "jaxlib", "triton", "swa_torch", "swa_pallas", "bridge"),
    "swa_torch": ("jax", "jaxlib", "triton", "swa_pallas", "bridge"),
    "swa_pallas": ("torch", "triton", "swa_torch", "bridge"),
    "bridge": ("torch", "jax", "jaxlib", "triton", "swa_torch", "swa_pallas"),
}

REPORT_FOREIGN = """
import importlib, sys
package, *foreign = sys.argv[1:]
importlib.import_module(package)
print(*sorted(set(foreign) & {name.partition(".")[0] for name in sys.modules}))
"""

BLOCK_THEN_IMPORT = """
import importlib, sys
package, *blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))
importlib.import_module(package)
"""

PYTHON_FLAGS = [pytest.param([], id="plain"), pytest.param(["-O"], id="optimised")]
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="swa_torch needs torch")
PACKAGES = [pytest.param(name, marks=NEEDS_TORCH if name == "swa_torch" else ()) for name in FOREIGN]


def run_fresh(script: str, *arguments: str, flags: list[str]) -> str:
    command = [sys.executable, *flags, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("flags", PYTHON_FLAGS)
@pytest.mark.parametrize("package", PACKAGES)
def test_import_brings_no_foreign_framework(package, flags):
    assert run_fresh(REPORT_FOREIGN, package, *FOREIGN[package], flags=flags) == ""


@pytest.mark.parametrize("flags", PYTHON_FLAGS)
@pytest.mark.parametrize("package", PACKAGES)
def test_import_works_without_what_it_does_not_need(package, flags):
    """`sys.modules[name] = None` makes `import name` raise, as on a machine without it."""
    blocked = [name for name in FOREIGN[package] if name in ("torch", "jax", "jaxlib", "triton")]
    run_fresh(BLOCK_THEN_IMPORT, package, *blocked, flags=flags)


def test_swa_pallas_re_exports_the_compatibility_planner():
    script = (
        "import swa_pallas, swa_plan\n"
        "assert swa_pallas.swa_decode_plan is swa_plan.swa_decode_plan\n"
        "assert swa_pallas.swa_decode_splits is swa_plan.swa_decode_splits\n"
    )
    run_fresh(script, flags=[])
