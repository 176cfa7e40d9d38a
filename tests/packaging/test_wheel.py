"""The built wheel is complete and works where the checkout is not."""

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("swa_plan", "swa_torch", "swa_pallas", "bridge")

DECODE = """
import sys
import torch
import swa_plan, swa_torch
from swa_plan import cases, tolerance

for package in (swa_plan, swa_torch):
    assert package.__file__.startswith(sys.argv[1]), f"imported from {package.__file__}"

case = cases.Case("wheel", "an empty request beside a long one", (20, 0), window=10, max_blocks=2, dtype="float32")
inputs = cases.make_inputs(case, poison=True)
query, *cache, block_table, seq_lens = map(torch.from_numpy, inputs.arrays())
out, lse = swa_torch.swa_decode(query, tuple(cache), block_table, seq_lens, window=10, return_lse=True)
tolerance.assert_close(out.numpy(), inputs, actual_lse=lse.numpy())
print("decoded")
"""


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--target", str(target))
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=target)
    return target


def test_wheel_holds_what_it_must(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    required = {f"{package}/{file}" for package in PACKAGES for file in ("__init__.py", "py.typed")}
    required.add("bridge/_data/trace.csv")
    assert required - names == set()
    for file in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f".dist-info/licenses/{file}") for name in names), file


def test_wheel_holds_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.partition("/")[0] for name in names}
    (info,) = (name for name in top_level if name.endswith(".dist-info"))
    assert top_level == {*PACKAGES, info}
    assert not [name for name in names if "__pycache__" in name]


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert metadata["Name"] == "swa-decode"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"torch", "jax", "cli", "test", "dev", "docs", "cpu"}
    requirements = metadata.get_all("Requires-Dist")
    core = {line.partition(">")[0] for line in requirements if "extra ==" not in line}
    assert core == {"numpy", "ml-dtypes"}
    assert not [line for line in requirements if "nvidia" in line or "cuda" in line]
    assert "swa = bridge._cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_decodes_on_the_cpu_outside_the_checkout(installed, tmp_path):
    pytest.importorskip("torch")
    # -P: neither the working directory nor the script's folder may supply a module.
    output = run(sys.executable, "-P", "-c", DECODE, str(installed), cwd=tmp_path, path=installed)
    assert output.strip() == "decoded"


def test_command_line_starts_outside_the_checkout(installed, tmp_path):
    pytest.importorskip("typer")
    output = run(sys.executable, "-P", "-m", "bridge._cli", "--help", cwd=tmp_path, path=installed)
    for command in ("replay", "plan", "doctor"):
        assert command in output
