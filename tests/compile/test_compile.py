"""Every kernel compiles for every chip that it is for, without a GPU: no spills, shared memory within the chip's limit.

What is compiled is what the planner picks for that chip.
"""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
    pytest.skip("Triton interprets in this process, so nothing can be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")

from swa_plan import DeviceProfile, Plan, Problem, plan
from swa_torch import PagedCache
from swa_torch._triton import _launch
from tests.compile.offline import PROFILES, Recorder, record_decode

DIMS = [(64, 64), (128, 128), (192, 192), (256, 256), (192, 128)]

# Rows of a program's matrix: 16 of a group of 8 heads, 64 of 8 packed rows of the same group.
ROWS = {16: 1, 64: 8}


def make_problem(dims, dtype="bfloat16", *, query_len=1, **fields):
    """Return a step5-like problem, large enough that rows are packed."""
    return Problem(
        max_requests=64, heads=16, kv_heads=2, k_dim=dims[0], v_dim=dims[1], window=512, block=16, max_blocks=128,
        query_len=query_len, dtype=dtype, **fields,
    )  # fmt: skip


def check(recorder, capability):
    """Compile one recorded launch and hold it against the chip."""
    usage = recorder.compile(capability)
    limit = DeviceProfile.named(PROFILES[capability]).shared_memory
    assert usage.spilled_bytes == 0, usage
    assert usage.registers <= 255, usage
    assert usage.shared_bytes <= limit, f"{usage} on a chip with {limit} bytes"


def check_decode(monkeypatch, chosen, capability, **options):
    """Compile both kernels of one plan; a plan with one split launches no combine."""
    split, combine = record_decode(monkeypatch, chosen, capability, **options)
    check(split, capability)
    assert bool(combine.launches) == (chosen.splits > 1)
    if combine.launches:
        check(combine, capability)


# One split and several in alternation: each chip, dtype, head size and row count meets both, in half the compilations.
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "x".join(map(str, dims)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("capability", PROFILES)
def test_decode_compiles_without_spills(monkeypatch, capability, dtype, dims, rows):
    chosen = plan(make_problem(dims, dtype, query_len=ROWS[rows]), DeviceProfile.named(PROFILES[capability]))
    assert chosen.rows == rows, "the planner no longer packs here: choose a problem where it does"
    several = (DIMS.index(dims) + (dtype == "float16") + (rows == 64) + list(PROFILES).index(capability)) % 2
    check_decode(monkeypatch, replace(chosen, splits=4 if several else 1), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_each_stage_holds_a_tile_of_keys_and_values(monkeypatch, capability):
    """Were page ids loaded where they are used, the pipeliner would spend its stages on them and hold one tile."""
    problem = make_problem((128, 128))
    tile_bytes = 32 * (128 + 128) * 2
    shared = {}
    for stages in (2, 3, 4):
        with monkeypatch.context() as patch:
            split, _ = record_decode(patch, Plan(problem, "portable", 1, 1, 32, 2, stages), capability)
        shared[stages] = split.compile(capability).shared_bytes
    assert shared[3] - shared[2] == pytest.approx(tile_bytes, rel=0.05)
    assert shared[4] - shared[3] == pytest.approx(tile_bytes, rel=0.05)


def heads(value=0.0, dtype=torch.float32):
    return torch.full((16,), value, dtype=dtype)


def rows_by_heads(rows=1):
    return torch.zeros(rows, 16)


SCALES = {"k_scale": torch.ones(2), "v_scale": torch.ones(())}
INDICES = torch.zeros(1, dtype=torch.int32)
EDGES = torch.tensor([0, 4], dtype=torch.int32)

# name: (capability, splits, fields of the problem, whether batch-invariant, options of the call)
FEATURES = {
    "gate-lse": (90, 1, {}, False, {"gate": rows_by_heads(), "lse": rows_by_heads()}),
    "gate-bf16-split": (90, 4, {}, False, {"gate": rows_by_heads().bfloat16(), "lse": rows_by_heads()}),
    "softcap-sinks": (90, 1, {}, False, {"softcap": 30.0, "sinks": heads()}),
    "softcap-sinks-split": (90, 4, {}, False, {"softcap": 30.0, "sinks": heads()}),
    "fp8-e4m3": (90, 4, {"cache_dtype": "float8_e4m3fn"}, False, SCALES),
    "fp8-e4m3-bits": (80, 1, {"cache_dtype": "float8_e4m3fn"}, False, SCALES),
    "fp8-e4m3-packed": (90, 1, {"cache_dtype": "float8_e4m3fn", "query_len": 8}, False, SCALES),
    "fp8-e5m2": (90, 1, {"cache_dtype": "float8_e5m2"}, False, SCALES),
    "int8": (90, 4, {"cache_dtype": "int8"}, False, SCALES),
    "ragged": (90, 4, {"query_len": 4, "ragged": True}, False, {"cu_query_lens": EDGES}),
    "kv-range": (90, 1, {}, False, {"kv_start": INDICES, "kv_end": INDICES}),
    "full-causal": (90, 4, {"window": None}, False, {}),
    "batch-invariant": (90, None, {}, True, {}),
    "batch-invariant-verify": (90, None, {"query_len": 2}, True, {"gate": rows_by_heads(2)}),
    "group-1": (90, 1, {"kv_heads": 16}, False, {}),
    "group-96": (90, 1, {"heads": 96, "kv_heads": 1}, False, {}),
    "fp32": (90, 1, {"dtype": "float32"}, False, {}),
    "many-splits": (90, 32, {}, False, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_compiles_without_spills(monkeypatch, name):
    capability, splits, fields, invariant, options = FEATURES[name]
    if capability < 89:
        # As on a real device of that age, which reads the bits.
        monkeypatch.setattr(_launch, "readable", lambda cache, device: cache.view(torch.uint8))
    problem = replace(make_problem((192, 192)), max_tokens=None, **{"cache_dtype": fields.get("dtype"), **fields})
    chosen = plan(problem, DeviceProfile.named(PROFILES[capability]), batch_invariant=invariant)
    check_decode(monkeypatch, chosen if splits is None else replace(chosen, splits=splits), capability, **options)


# Source and cache dtypes: a copy, and a conversion to each quantised format.
@pytest.mark.parametrize(
    ("capability", "dtype", "scales"),
    [
        (80, torch.bfloat16, (None, None)),
        (90, torch.bfloat16, (None, None)),
        (120, torch.float16, (None, None)),
        (90, torch.float8_e4m3fn, (1.0, 1.0)),
        (90, torch.float8_e5m2, (1.0, 1.0)),
        (100, torch.float8_e4m3fn, (1.0, 1.0)),
        (80, torch.int8, (1.0, 1.0)),
        (90, torch.int8, (1.0, 1.0)),
    ],
)
def test_append_compiles_without_spills(monkeypatch, capability, dtype, scales):
    recorder = Recorder(_launch.swa_append)
    monkeypatch.setattr(_launch, "swa_append", recorder)
    monkeypatch.setattr(_launch, "device_profile", lambda device: DeviceProfile.named(PROFILES[capability]))
    cache = PagedCache.empty(
        "pages kv_heads block (kv dim)", pages=2, block=16, kv_heads=2, k_dim=192, v_dim=128, dtype=dtype
    )
    source = dtype if scales[0] is None else torch.bfloat16
    tensors = (None, None) if scales[0] is None else (torch.ones(2), torch.ones(()))
    _launch.append(
        torch.zeros(3, 2, 192, dtype=source), torch.zeros(3, 2, 128, dtype=source), *cache.views(),
        torch.zeros(3, dtype=torch.int64), *tensors, *scales,
    )  # fmt: skip
    check(recorder, capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_merge_states_compiles_without_spills(monkeypatch, capability):
    recorder = Recorder(_launch.swa_decode_combine)
    monkeypatch.setattr(_launch, "swa_decode_combine", recorder)
    monkeypatch.setattr(_launch, "device_profile", lambda device: DeviceProfile.named(PROFILES[capability]))
    _launch.merge(
        torch.zeros(3, 1, 16, 192), torch.zeros(3, 1, 16), heads(), rows_by_heads(),
        torch.zeros(1, 16, 192, dtype=torch.bfloat16), rows_by_heads(),
    )  # fmt: skip
    check(recorder, capability)
