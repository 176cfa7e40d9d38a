"""`bridge.parity`: the names other projects use, what it judges, what it refuses, and that it can miss."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bridge import parity
from bridge.parity import _backends
from bridge.parity._backends import CROSSED, DIRECT
from swa_plan import DeviceProfile, Problem, cases, plan, reference
from swa_plan._chosen import check_fits
from swa_plan._dtypes import numpy_dtype

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BOTH = find_spec("torch") is not None and find_spec("jax") is not None
NEEDS_BOTH = pytest.mark.skipif(not BOTH or INTERPRETED, reason="needs torch and jax, neither interpreted")
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
NEEDS_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")

FEATURES = {
    "a window": lambda case: case.window is not None and max(case.seq_lens) > case.window,
    "no window": lambda case: case.window is None,
    "rows of one request": lambda case: case.query_len > 1 and not case.ragged,
    "ragged rows": lambda case: case.ragged,
    "empty requests": lambda case: 0 in case.seq_lens,
    "gate": lambda case: case.gate,
    "sinks": lambda case: case.sinks,
    "softcap": lambda case: case.softcap is not None,
    "ranges": lambda case: case.kv_range is not None,
    "fp8": lambda case: (case.cache_dtype or "").startswith("float8"),
    "int8": lambda case: case.cache_dtype == "int8",
    "one base": lambda case: "kv" in case.layout,
    "layers": lambda case: case.layer is not None,
    "unequal head sizes": lambda case: case.k_dim != case.v_dim,
    "float32": lambda case: case.dtype == "float32",
    "invalid pages": lambda case: bool(case.invalid_pages),
}


def as_computed(inputs):
    """Return the float64 result, rounded as a backend would."""
    out, lse = reference.swa_decode(*inputs.arrays(), **inputs.reference_options(), return_lse=True)
    return out.astype(inputs.query.dtype), lse.astype(np.float32)


def run_python(script, *arguments, **environment):
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("feature", FEATURES)
def test_the_brief_cases_meet_each_feature(feature):
    assert any(FEATURES[feature](case) for case in parity.BRIEF)


def test_names_are_those_of_the_cases():
    assert parity.case_names() == tuple(case.name for case in cases.CASES)
    assert parity.CASES is cases.CASES


def test_random_cases_follow_the_seed():
    drawn = parity.random_cases(3, seed=5)
    assert drawn == parity.random_cases(3, seed=5) != parity.random_cases(3, seed=6)
    assert [eval(repr(case), {"Case": cases.Case}) for case in drawn] == drawn


def test_inputs_are_poisoned_and_their_visible_data_are_not():
    clean, poisoned = parity.inputs("window-edge", poison=False), parity.inputs("window-edge")
    assert not np.isnan(clean.key_cache.astype(np.float32)).any()
    assert np.isnan(poisoned.key_cache.astype(np.float32)).any()
    assert parity.same_bits(as_computed(clean)[0], as_computed(poisoned)[0])


def test_the_interpreter_gets_no_bf16():
    inputs = parity.inputs(replace(cases.by_name("gate-bf16"), out_dtype="bfloat16", dtype="bfloat16"), "interpret")
    assert inputs.query.dtype == inputs.gate.dtype == np.float16
    assert inputs.out_dtype == "float16"


def test_every_backend_is_present_or_absent_for_a_reason():
    present, absent = parity.backends(), parity.absent()
    assert "float64" in present
    assert set(present) | set(absent) == set(_backends.BACKENDS)
    assert not set(present) & set(absent)
    assert all(absent.values())


@pytest.mark.parametrize("backend", parity.backends())
@pytest.mark.parametrize("name", ["verify-gate", "int8-packed-layers"])
def test_backends_present_are_within_the_rule(name, backend):
    outcome = parity.check(name, backend, seed=3)
    assert outcome.ok, outcome.message
    assert outcome.bitwise
    assert outcome.same_memory is (True if backend in CROSSED else None)
    assert 0 < outcome.ratio == outcome.error / outcome.bound <= 1
    assert parity.Outcome.from_json(json.loads(json.dumps(outcome.to_json(), allow_nan=False))) == outcome


# Each layout, quantised dtype and index width crosses; the tables of "int64" need JAX's 64-bit types.
@NEEDS_BOTH
@pytest.mark.parametrize("way", CROSSED)
@pytest.mark.parametrize(
    "name", ["fp8-e4m3", "fp8-e5m2", "int64", "out-fp32-gate", "layout-hnd", "layout-kv-pages", "layout-packed-hnd"]
)
def test_what_crosses_has_one_address_and_equal_bits(name, way):
    outcome = parity.check(name, way)
    assert outcome.ok, outcome.message
    assert outcome.same_memory is True
    on_gpu = "triton" in parity.backends() and "jax-pallas_triton" in parity.backends()
    kernels = {"torch>jax": ("jax-xla", "jax-pallas_triton"), "jax>torch": ("cpu", "triton")}
    assert outcome.bitwise_to == kernels[way][on_gpu]


@NEEDS_BOTH
@pytest.mark.parametrize("way, import_or_export", [("torch>jax", "to_jax"), ("jax>torch", "to_torch")])
def test_a_copy_on_the_way_is_a_miss(way, import_or_export, monkeypatch):
    import bridge

    share = getattr(bridge, import_or_export)
    monkeypatch.setattr(bridge, import_or_export, lambda x: share(x, copy=True))
    outcome = parity.check("window-one", way)
    assert outcome.bitwise
    assert outcome.same_memory is False
    assert not outcome.ok
    assert "an array was copied" in outcome.message


@NEEDS_BOTH
def test_one_array_copied_on_the_way_is_a_miss(monkeypatch):
    """Not the cache, but the table."""
    import bridge

    share = bridge.to_jax

    def copies_tables(x):
        return share(x, copy=getattr(x, "ndim", 0) == 2 and not x.is_floating_point())

    monkeypatch.setattr(bridge, "to_jax", copies_tables)
    outcome = parity.check("window-one", "torch>jax")
    assert outcome.bitwise
    assert outcome.same_memory is False


@NEEDS_BOTH
def test_other_bits_after_a_crossing_are_a_miss(monkeypatch):
    """Within the rule, but not what the same kernel computes without crossing."""
    from bridge.parity import _crossed

    run_crossed = _crossed.run_crossed

    def nudged(inputs, way):
        crossing = run_crossed(inputs, way)
        out = crossing.result.out.copy()
        out.flat[0] = np.nextafter(out.flat[0], np.asarray(np.inf, out.dtype))
        return crossing._replace(result=crossing.result._replace(out=out))

    monkeypatch.setattr(_crossed, "run_crossed", nudged)
    outcome = parity.check(replace(cases.by_name("window-one"), dtype="float32"), "torch>jax")
    assert outcome.ratio <= 1
    assert not outcome.bitwise
    assert not outcome.ok


@NEEDS_BOTH
def test_old_versions_do_not_cross(monkeypatch):
    def refuse():
        raise NotImplementedError("torch must be at least 2.11 for the bridge, got 2.9")

    monkeypatch.setattr(_backends, "check_versions", refuse)
    assert set(CROSSED) <= set(parity.absent())
    assert parity.absent()["torch>jax"] == "torch must be at least 2.11 for the bridge, got 2.9"


@NEEDS_TORCH
@pytest.mark.skipif(INTERPRETED, reason="needs the backend cpu")
def test_what_reads_poison_is_a_miss(monkeypatch):
    """A window one key too wide reads a slot that nothing may read."""
    import swa_torch

    decode = swa_torch.swa_decode

    def too_wide(*args, window, **options):
        return decode(*args, window=window + 1, **options)

    monkeypatch.setattr(swa_torch, "swa_decode", too_wide)
    outcome = parity.check("window-edge", "cpu")
    assert not outcome.ok
    assert not outcome.bitwise
    assert outcome.error == np.inf
    assert outcome.to_json()["error"] is None


@NEEDS_TORCH
@pytest.mark.skipif(INTERPRETED, reason="needs the backend cpu")
def test_a_run_that_does_not_repeat_is_a_miss(monkeypatch):
    import swa_torch

    decode, calls = swa_torch.swa_decode, []

    def unsteady(*args, **kw):
        calls.append(None)
        out, lse = decode(*args, **kw)
        return out, lse + (len(calls) % 2) * 5e-7  # about an ulp: within the rule

    monkeypatch.setattr(swa_torch, "swa_decode", unsteady)
    outcome = parity.check("window-edge", "cpu")
    assert (outcome.ok, outcome.bitwise) == (False, False)
    assert outcome.ratio <= 1
    assert "the bits differ from cpu without poison" in outcome.message


def to_numpy(array):
    return array


def to_torch(array):
    return importlib.import_module("bridge.parity._torch").to_torch(array)


def to_jax(array):
    return importlib.import_module("jax.numpy").asarray(array)


FRAMEWORKS = (
    pytest.param("numpy", to_numpy, id="numpy"),
    pytest.param("torch", to_torch, id="torch", marks=NEEDS_TORCH),
    pytest.param("jax", to_jax, id="jax", marks=NEEDS_JAX),
)


@pytest.mark.parametrize("framework, to_array", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_arrays_of_any_framework_keep_their_bits(framework, to_array, dtype):
    array = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4).astype(numpy_dtype(dtype))
    given = to_array(array)
    assert type(given).__module__.startswith(framework)
    assert parity.same_bits(given, array)
    assert not parity.same_bits(given, -array)


@pytest.mark.parametrize("framework, to_array", FRAMEWORKS)
def test_assert_close_takes_any_framework_and_can_fail(framework, to_array):
    inputs = parity.inputs("verify-gate")
    out, lse = as_computed(inputs)
    parity.assert_close(to_array(out), inputs, lse=to_array(lse))
    parity.assert_close((to_array(out), to_array(lse)), inputs)
    wrong_out, wrong_lse = out.copy(), lse.copy()
    wrong_out[1, 2, 3] += 1
    wrong_lse[1, 2] += 1
    with pytest.raises(AssertionError, match="out misses the tolerance rule at token 1, head 2, dim 3"):
        parity.assert_close(to_array(wrong_out), inputs)
    with pytest.raises(AssertionError, match="lse misses the tolerance rule"):
        parity.assert_close((to_array(out), to_array(wrong_lse)), inputs)
    assert parity.compare(to_array(wrong_out), inputs).ratio > 1


def test_errors_name_what_was_given():
    inputs = parity.inputs("window-one")
    out, lse = as_computed(inputs)
    with pytest.raises(TypeError, match=r"lse must be left out where actual is \(out, lse\)"):
        parity.assert_close((out, lse), inputs, lse=lse)
    with pytest.raises(ValueError, match=r"backend must be one of float64, .*got 'gpu'"):
        parity.check("window-one", "gpu")
    with pytest.raises(ValueError, match=r"backend must be of one framework: cpu, .*got 'float64'"):
        parity.arguments(inputs, "float64")
    with pytest.raises(ValueError, match=r"name must be one of .*got 'nothing'"):
        parity.check("nothing", "float64")
    with pytest.raises(ValueError, match="takes no further options, got plan"):
        parity.run(inputs, "float64", plan=None)


def test_an_absent_backend_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(_backends, "why_absent", {"triton": "no GPU today"}.get)
    assert parity.absent() == {"triton": "no GPU today"}
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: no GPU today"):
        parity.check("window-one", "triton")


def test_the_import_brings_no_framework():
    script = (
        "import sys; from bridge import parity; parity.inputs('window-one')\n"
        "imported = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(imported & {'torch', 'jax', 'jaxlib', 'triton', 'pytest'}))"
    )
    assert run_python(script).strip() == "[]"


@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_one_framework_is_enough(missing):
    """`sys.modules[name] = None` makes `import name` raise, and `find_spec` return None, as on a machine without it."""
    script = (
        "import sys, json; missing = sys.argv[1]; sys.modules[missing] = None\n"
        "from bridge import parity\n"
        "print(json.dumps([parity.backends(), parity.absent(), parity.check('window-one', 'float64').ok]))"
    )
    present, absent, ok = json.loads(run_python(script, missing, TRITON_INTERPRET="0"))
    assert ok
    assert not {name for name in present if missing in name or DIRECT.get(name) == missing}
    assert all("not installed" in absent[name] for name in CROSSED)
    assert f"pip install 'swa-decode[{missing}]'" in absent[{"torch": "cpu", "jax": "jax-xla"}[missing]]


def five_lines():
    """Return the foreign suite of the package's docstring, without its indent."""
    block = parity.__doc__.partition("::\n\n")[2].partition("\n\nand this")[0]
    return "\n".join(line.removeprefix("    ") for line in block.splitlines()) + "\n"


def test_the_documentation_shows_the_same_suite():
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert [line for line in five_lines().splitlines() if line and line not in text] == []


@NEEDS_TORCH
@pytest.mark.skipif(INTERPRETED, reason="needs the backend cpu")
def test_a_foreign_suite_runs_the_cases_and_fails_where_its_decode_is_wrong(tmp_path):
    suite = five_lines()
    own = "from swa_torch import swa_decode as decode  # in place of it: yours\n"
    assert own in suite
    wrong = "def decode(*args, **options):\n    out, lse = swa_decode(*args, **options)\n    return out + 1, lse\n"
    (tmp_path / "test_right.py").write_text(suite)
    (tmp_path / "test_wrong.py").write_text(suite.replace(own, f"from swa_torch import swa_decode\n\n{wrong}"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k"]
    cases_of_both = "window-edge or sinks or fp8-e4m3"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, cases_of_both, "."], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    selected = [name for name in parity.case_names() if any(part in name for part in cases_of_both.split(" or "))]
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{len(selected)} failed, {len(selected)} passed" in result.stdout
    assert "out misses the tolerance rule" in result.stdout
    assert "test_right.py::" not in result.stdout


@NEEDS_TORCH
def test_an_interpreter_that_fails_is_absent(monkeypatch):
    from bridge.parity import _torch

    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setattr(_torch, "interpreter_fault", lambda triton, numpy: f"{triton} with {numpy} fails")
    assert _torch.why_absent("interpret").endswith(f"with {np.__version__} fails")


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("dim", [64, 256])
def test_a_plan_of_the_hopper_kernel_fits_however_it_is_cut(dim, group):
    h200 = DeviceProfile.named("h200")
    problem = Problem(4, group, 1, dim, dim, None, 64, 64, query_len=4)
    made = plan(problem, h200, kernel="hopper")
    for splits in (1, 2, 3, 8, 17):
        for pack in (1, 2, 3, 4):
            cut = _backends._hopper_plan(made, splits, pack)
            assert (cut.splits, cut.pack) == (splits, pack)
            assert cut.stages <= made.stages
            check_fits(cut, h200)


@NEEDS_TORCH
@pytest.mark.parametrize(
    "capability, version, reason", [(90, "3.6.0", None), (80, "3.6.0", "sm_80"), (90, "3.5.1", "3.5.1")]
)
def test_the_hopper_kernel_is_absent_where_it_does_not_run(capability, version, reason, monkeypatch):
    import torch

    from bridge.parity import _torch
    from swa_torch import _device

    pytest.importorskip("triton", reason="needs triton")
    profile = DeviceProfile.named({80: "a100", 90: "h200"}[capability])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_torch, "cuda_profile", lambda index: profile)
    monkeypatch.setattr(_device, "device_profile", lambda device: profile)
    monkeypatch.setattr("triton.__version__", version)
    found = _torch.why_absent("gluon")
    assert found is None if reason is None else reason in found
    assert _torch.why_absent("triton") is None
