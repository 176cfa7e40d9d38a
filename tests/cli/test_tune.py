"""`swa tune` without a GPU: what it prints, what it stores and when it refuses to, and who finds what it stored."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from bridge._cli import _doctor, _tune
from bridge._cli._app import app
from bridge._tune import device as devices
from bridge._tune import sample
from bridge._tune.tuning import tune
from swa_plan import DeviceProfile
from swa_plan import _profiles as profiles
from swa_plan._costs import COST_NAMES
from swa_plan._profiles import store_profile, stored_profile
from tests.cli.fake_gpu import H200, FakeBench, planted, quiet


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SWA_DECODE_CONFIG", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    stored_profile.cache_clear()
    yield tmp_path
    stored_profile.cache_clear()


@pytest.fixture
def gpu(folder, monkeypatch):
    """A machine with an H200 whose combine is dear, and torch and Triton."""
    monkeypatch.setattr(_tune, "this_device", lambda: H200)
    monkeypatch.setattr(_tune, "find_spec", lambda name: name)
    costs = replace(H200.shipped.costs, combine=4.0, start=6.0)
    monkeypatch.setattr(_tune, "make_measurer", lambda device, processes: FakeBench(device, costs))
    return costs


def swa(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)


def test_it_stores_what_helps(gpu, folder):
    result = swa()
    assert result.exit_code == 0
    for words in ("NVIDIA H200", "combine", "median error", "chosen plans over the best", "window 4096"):
        assert words in result.stdout
    (path,) = (folder / "profiles").iterdir()
    assert f"stored: {path}" in result.stderr
    found = DeviceProfile.for_cuda(*H200.key)
    assert found.costs.combine == pytest.approx(gpu.combine, rel=0.15)
    assert found.name == "h200"
    stored = stored_profile(*H200.key)
    assert stored.provenance.plans > 150
    assert stored.provenance.median_error < 0.03
    assert stored.provenance.versions["swa-decode"]


def test_json_is_pure(gpu, folder):
    result = swa("--json")
    report = json.loads(result.stdout)
    assert report["stored"] == str(next((folder / "profiles").iterdir()))
    assert set(report["costs"]["measured"]) == set(COST_NAMES)
    assert report["median_error"]["measured"] < report["median_error"]["shipped"]
    assert report["regret"]["measured"] <= report["regret"]["shipped"]
    assert len(report["shapes"]) == len(sample.problems(H200.shipped))


def test_a_dry_run_stores_nothing(gpu, folder):
    result = swa("--dry-run", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["stored"] is None
    assert list(folder.iterdir()) == []
    assert "--dry-run" in result.stderr


@pytest.fixture
def misleading_gpu(gpu, monkeypatch):
    """A GPU whose first times are those of another one, so that the fitted costs choose badly."""

    class Misleading(FakeBench):
        def together(self, plans, advance):
            self.profile = H200.shipped
            return super().together(plans, advance)

    other = replace(H200.shipped.costs, combine=0.0, partial=0.0, split=0.0, start=0.3)
    monkeypatch.setattr(_tune, "make_measurer", lambda device, processes: Misleading(device, other))


def test_what_makes_plans_slower_is_stored_by_force_only(misleading_gpu, folder):
    result = swa()
    assert result.exit_code == 1
    assert "plans would be slower" in result.stderr
    assert list(folder.rglob("*.*")) == []
    assert swa("--dry-run").exit_code == 0
    assert list(folder.rglob("*.*")) == []
    assert swa("--force").exit_code == 0
    assert stored_profile(*H200.key) is not None


def test_times_that_make_no_sense_exit_with_1(gpu, folder, monkeypatch):
    bench = FakeBench(H200, gpu, noise=3.0)
    monkeypatch.setattr(_tune, "make_measurer", lambda device, processes: bench)
    result = swa("--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "nothing is stored: the times fit no costs" in result.stderr


def test_showing_and_forgetting(gpu, folder):
    shown = swa("--show").stdout
    assert "shipped with swa-decode" in shown
    assert json.loads(swa("--show", "--json").stdout)["source"] == "shipped"
    swa()
    shown = swa("--show").stdout
    assert "measured 20" in shown
    assert str(H200.file) in shown
    report = json.loads(swa("--show", "--json").stdout)
    assert report["source"] == "stored"
    assert report["file"] == str(H200.file)
    assert report["profile"]["costs"] == asdict(stored_profile(*H200.key).costs)
    assert report["provenance"]["device"] == "NVIDIA H200"
    assert f"deleted: {H200.file}" in swa("--forget").stdout
    assert not H200.file.exists()
    assert "nothing is stored for NVIDIA H200" in swa("--forget").stdout
    assert json.loads(swa("--forget", "--json").stdout) == {"deleted": None}


@pytest.mark.parametrize("option", [[], ["--show"], ["--forget"], ["--json"]], ids=str)
def test_without_a_gpu_it_exits_with_2(folder, monkeypatch, option):
    monkeypatch.setattr(_tune, "this_device", lambda: None)
    result = swa(*option)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "needs a CUDA device" in result.stderr


def test_without_torch_it_exits_with_2_and_says_whom_a_profile_serves(gpu, monkeypatch):
    monkeypatch.setattr(_tune, "find_spec", lambda name: None if name == "torch" else name)
    result = swa()
    assert result.exit_code == 2
    assert "needs torch and triton, and torch cannot be imported" in result.stderr
    assert "serves JAX too" in result.stderr
    assert swa("--show").exit_code == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--show", "--forget"], "only one of --show, --forget"),
        (["--dry-run", "--force"], "got --dry-run, --force"),
        (["--processes", "0"], "--processes"),
    ],
)
def test_wrong_usage_exits_with_2(gpu, options, words):
    result = swa(*options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_nowhere_to_store_is_said_before_measuring(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(_tune, "make_measurer", lambda *_: pytest.fail("it measured"))
    monkeypatch.setenv("SWA_DECODE_CONFIG", "")
    result = swa()
    assert result.exit_code == 2
    assert "SWA_DECODE_CONFIG is set and empty" in result.stderr
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWA_DECODE_CONFIG", str(tmp_path / "file"))
    assert "must name a folder" in swa().stderr
    for name in (f"{tmp_path}/file/x", "~nosuchuser/x"):
        monkeypatch.setenv("SWA_DECODE_CONFIG", name)
        result = swa()
        assert result.exit_code == 2
        assert "SWA_DECODE_CONFIG must name a folder" in result.stderr
    monkeypatch.setenv("SWA_DECODE_CONFIG", str(tmp_path / "later"))
    (tmp_path / "later").mkdir()
    monkeypatch.setattr(profiles.tempfile, "TemporaryFile", lambda dir: (_ for _ in ()).throw(OSError("read-only")))
    result = swa()
    assert result.exit_code == 2
    assert "read-only" in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_what_cannot_be_stored_is_reported_all_the_same(gpu, folder, monkeypatch, options):
    monkeypatch.setattr(_tune, "store_profile", lambda stored: (_ for _ in ()).throw(OSError("no space left")))
    result = swa(*options)
    assert result.exit_code == 1
    assert "nothing is stored: no space left" in result.stderr
    assert "combine" in result.stdout
    if options:
        assert json.loads(result.stdout)["stored"] is None


def test_what_cannot_be_deleted_is_said(gpu, folder, monkeypatch):
    monkeypatch.setattr(_tune, "forget_profile", lambda *key: (_ for _ in ()).throw(OSError("read-only")))
    result = swa("--forget")
    assert result.exit_code == 1
    assert "nothing is deleted: read-only" in result.stderr
    monkeypatch.undo()
    monkeypatch.setattr(_tune, "this_device", lambda: H200)
    monkeypatch.setenv("SWA_DECODE_CONFIG", "~nosuchuser/x")
    assert swa("--forget").exit_code == 2


@pytest.mark.parametrize("changed", [{"date": 5}, {"median_error": "x"}, {"versions": ["1"]}], ids=str)
def test_a_provenance_of_other_types_is_ignored_by_who_prints_it(gpu, folder, changed):
    values = json.loads(tune(H200, FakeBench(H200, gpu), quiet).to_store().to_json())
    values["provenance"].update(changed)
    H200.file.parent.mkdir()
    H200.file.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match=next(iter(changed))):
        assert "shipped with swa-decode" in swa("--show").stdout
    stored_profile.cache_clear()
    with pytest.warns(UserWarning, match=next(iter(changed))):
        found = _doctor._profile([{"platform": "cuda", "name": "NVIDIA H200", "capability": 90, "num_sms": 132}])
    assert "shipped" in found["source"]


# --- devices ---


def test_this_device_is_none_on_a_machine_without_one(monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert devices.this_device() is None
    monkeypatch.setattr(devices._frameworks, "installed", lambda name: name == "jax")
    pytest.importorskip("jax")
    assert devices.this_device() is None
    monkeypatch.setattr(devices._frameworks, "installed", lambda name: False)
    assert devices.this_device() is None


def test_a_device_as_torch_describes_it(monkeypatch):
    torch = pytest.importorskip("torch")

    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132
        memory_clock_rate, memory_bus_width, L2_cache_size = 3_201_000, 6016, 62_914_560

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert devices.this_device() == devices.Device("NVIDIA H200", 90, 132, 4814, 62_914_560)
    from swa_torch._device import memory_gbps

    assert memory_gbps(object()) is None


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("something else\n", None),
    ],
)
def test_the_drivers_version(monkeypatch, tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "version")
    assert devices.driver_version() == version
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "none")
    assert devices.driver_version() is None


def test_doctor_names_the_profile_and_its_provenance(folder):
    cpu = {"platform": "cpu", "name": "cpu", "capability": None, "num_sms": None}
    h200 = {"name": "NVIDIA H200", "capability": 90, "num_sms": 132}
    assert _doctor._profile([cpu]) is None
    found = _doctor._profile([cpu, h200])
    assert (found["name"], found["file"]) == ("h200", None)
    assert "shipped" in found["source"]
    tuning = tune(H200, FakeBench(H200, planted(2)), quiet)
    path = store_profile(tuning.to_store())
    found = _doctor._profile([h200])
    assert found["file"] == str(path)
    assert "measured 20" in found["source"]


def test_looking_at_the_command_imports_no_framework():
    script = (
        "import sys; sys.argv = ['swa', 'tune', '--help']\n"
        "from bridge._cli import _app\n"
        "print(sorted({'torch', 'jax', 'triton'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
