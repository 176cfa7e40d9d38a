"""The planner: the original one to the letter, and laws that every plan of ours keeps, whatever the problem."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swa_plan import DeviceProfile, Plan, Problem, plan, swa_decode_plan, swa_decode_splits
from swa_plan._costs import Tile, shared_bytes

GPUS = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")
DTYPES = ("bfloat16", "float16", "float32")
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")


# --- the original planner ---


def specified_splits(programs: int, num_sms: int, window: int) -> int:
    """The specification, as alternatives: the largest power of two up to 8 that every condition allows."""
    reached = 1
    for candidate in (2, 4, 8):
        if programs * candidate > 2 * num_sms or window // candidate < 64:
            return reached
        reached = candidate
    return reached


def specified_plan(
    tokens: int, kv_heads: int, group: int, query_len: int, num_sms: int, window: int
) -> tuple[int, int]:
    """The specification of pack and splits."""
    pack = 1
    if query_len > 1 and tokens * kv_heads >= 128 and query_len * group <= 64:
        pack = query_len
    return pack, specified_splits((tokens // pack) * kv_heads, num_sms, window)


@settings(max_examples=2000)
@given(
    tokens=st.integers(0, 600), kv_heads=st.sampled_from([1, 2, 4, 8]), group=st.integers(1, 16),
    query_len=st.integers(1, 8), num_sms=st.sampled_from([1, 108, 132, 148]), window=st.integers(64, 4096),
)  # fmt: skip
def test_the_original_planner_is_as_specified(tokens, kv_heads, group, query_len, num_sms, window):
    expected = specified_plan(tokens, kv_heads, group, query_len, num_sms, window)
    assert swa_decode_plan(tokens, kv_heads, group, query_len, num_sms, window) == expected


@pytest.mark.parametrize("num_sms", [1, 108, 132, 148])
def test_the_original_splits_are_as_specified_at_every_edge(num_sms):
    for window in (64, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4096):
        for programs in range(4 * num_sms + 2):
            assert swa_decode_splits(programs, num_sms, window) == specified_splits(programs, num_sms, window)


# The step5 shapes: batches of tensor-parallel ranks on 132 multiprocessors.
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "query_len", "window", "expected"),
    [
        (1, 1, 8, 1, 512, (1, 8)),
        (32, 1, 8, 1, 512, (1, 8)),
        (33, 1, 8, 1, 512, (1, 8)),
        (34, 1, 8, 1, 512, (1, 4)),
        (66, 1, 8, 1, 512, (1, 4)),
        (67, 1, 8, 1, 512, (1, 2)),
        (132, 1, 8, 1, 512, (1, 2)),
        (133, 1, 8, 1, 512, (1, 1)),
        (256, 8, 8, 1, 512, (1, 1)),
        (127, 1, 8, 4, 512, (1, 2)),
        (128, 1, 8, 4, 512, (4, 8)),
        (128, 1, 16, 4, 512, (4, 8)),
        (128, 1, 16, 5, 512, (1, 2)),
        (0, 8, 8, 1, 512, (1, 8)),
        (1, 1, 8, 1, 64, (1, 1)),
        (1, 1, 8, 1, 128, (1, 2)),
    ],
)
def test_the_original_planner_by_example(tokens, kv_heads, group, query_len, window, expected):
    assert swa_decode_plan(tokens, kv_heads, group, query_len, 132, window) == expected


# --- our planner ---


@st.composite
def problems(draw):
    """Draw a problem of any shape that the kernels support."""
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 130))
    dtype = draw(st.sampled_from(DTYPES))
    block = draw(st.sampled_from([1, 16, 24, 64, 528]))
    ragged = draw(st.booleans())
    requests, query_len = draw(st.integers(0, 600)), draw(st.integers(1, 12))
    return Problem(
        max_requests=requests,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        k_dim=16 * draw(st.integers(1, 16)),
        v_dim=16 * draw(st.integers(1, 16)),
        window=draw(st.none() | st.integers(1, 5000)),
        block=block,
        max_blocks=draw(st.integers(0, 300)),
        query_len=query_len,
        dtype=dtype,
        cache_dtype=draw(st.sampled_from((dtype, *QUANTISED))),
        ragged=ragged,
        max_tokens=requests * query_len + draw(st.integers(0, 99)) if ragged else None,
    )


def is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


@settings(max_examples=500)
@given(problem=problems(), device=st.sampled_from(GPUS), invariant=st.booleans())
def test_every_plan_is_legal(problem, device, invariant):
    profile = DeviceProfile.named(device)
    chosen = plan(problem, profile, batch_invariant=invariant)
    assert chosen.problem == problem
    assert (chosen.kernel, chosen.device, chosen.batch_invariant) == ("portable", device, invariant)
    assert 1 <= chosen.pack <= problem.query_len
    assert chosen.pack == 1 or chosen.pack * problem.group <= 64
    assert 1 <= chosen.splits <= 65535
    assert is_power_of_two(chosen.tile)
    assert 16 <= chosen.tile <= 128
    assert is_power_of_two(chosen.warps)
    assert 16 <= chosen.rows <= 64
    assert is_power_of_two(chosen.rows)
    assert chosen.rows >= chosen.pack * problem.head_tile
    assert problem.head_tile * problem.head_tiles >= problem.group
    assert chosen.row_tiles * chosen.pack >= problem.query_len
    tile = Tile(chosen.tile, chosen.warps, chosen.stages)
    assert shared_bytes(problem, chosen.rows, tile) <= profile.shared_memory
    explained = chosen.explain()
    for word in (f"splits {chosen.splits}", f"pack {chosen.pack}", f"{chosen.workspace_bytes} bytes of workspace"):
        assert word in explained


@given(problem=problems(), device=st.sampled_from(GPUS), invariant=st.booleans(), tokens=st.integers(0, 600))
def test_the_workspace_is_exact(problem, device, invariant, tokens):
    chosen = plan(problem, DeviceProfile.named(device), batch_invariant=invariant)
    offset, total = chosen.workspace_layout(tokens)
    if chosen.splits == 1:
        assert (offset, total) == (0, 0)
    else:
        rows = tokens * chosen.splits * problem.heads
        assert offset % 256 == 0
        assert 0 <= offset - rows * problem.v_dim * 4 < 256
        assert total == offset + rows * 4
    assert chosen.workspace_bytes == chosen.workspace_layout(problem.max_tokens)[1]


# --- batch-invariant plans ---


@settings(max_examples=300)
@given(
    problem=problems(), device=st.sampled_from(GPUS), requests=st.integers(0, 3000), extra=st.integers(0, 50),
)  # fmt: skip
def test_invariant_plans_do_not_depend_on_the_batch(problem, device, requests, extra):
    profile = DeviceProfile.named(device)
    tokens = requests * problem.query_len + extra if problem.ragged else None
    other = replace(problem, max_requests=requests, max_tokens=tokens)
    mine, theirs = (plan(one, profile, batch_invariant=True) for one in (problem, other))
    assert replace(theirs, problem=problem) == mine


@settings(max_examples=300)
@given(problem=problems(), device=st.sampled_from(GPUS), query_len=st.integers(1, 12), ragged=st.booleans())
def test_invariant_chunks_do_not_depend_on_the_rows(problem, device, query_len, ragged):
    """A row's sums are then cut and ordered alike whether it is decoded alone, verified with others, or ragged."""
    profile = DeviceProfile.named(device)
    other = replace(problem, query_len=query_len, ragged=ragged, max_tokens=None)
    mine, theirs = (plan(one, profile, batch_invariant=True) for one in (problem, other))
    for name in ("chunk", "tile", "warps", "stages", "rows"):
        assert getattr(mine, name) == getattr(theirs, name), name


@settings(max_examples=300)
@given(problem=problems(), device=st.sampled_from(GPUS), last=st.integers(0, 200_000))
def test_invariant_chunks_cover_every_live_range(problem, device, last):
    chosen = plan(problem, DeviceProfile.named(device), batch_invariant=True)
    assume(problem.capacity > 0)
    last = min(last, problem.capacity - 1)
    first = 0 if problem.window is None else max(0, last - (chosen.pack - 1) - problem.window + 1)
    assert chosen.chunk % chosen.tile == 0
    assert (first // chosen.chunk + chosen.splits) * chosen.chunk > last


# --- plans of the original signature ---


@given(problem=problems(), splits=st.integers(1, 65535), pack=st.integers(1, 14))
def test_from_splits_keeps_the_original_rule(problem, splits, pack):
    if problem.query_len % pack:
        with pytest.raises(ValueError, match=f"query_len={problem.query_len} and pack={pack}"):
            Plan.from_splits(problem, splits, pack)
    elif pack > 1 and pack * problem.group > 64:
        with pytest.raises(ValueError, match=f"pack={pack} and group={problem.group}"):
            Plan.from_splits(problem, splits, pack)
    else:
        made = Plan.from_splits(problem, splits, pack)
        assert (made.splits, made.pack, made.batch_invariant) == (splits, pack, False)
        tile = Tile(made.tile, made.warps, made.stages)
        assert shared_bytes(problem, made.rows, tile) <= DeviceProfile.named("h200").shared_memory


@pytest.mark.parametrize(
    ("splits", "error"), [(0, ValueError), (65536, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_from_splits_names_wrong_splits(splits, error):
    with pytest.raises(error, match=f"splits must be .*{splits}"):
        Plan.from_splits(PROBLEM, splits)


# --- plans as values ---

PROBLEM = Problem(
    max_requests=16, heads=16, kv_heads=2, k_dim=192, v_dim=128, window=512, block=16, max_blocks=100, query_len=2
)  # fmt: skip


@given(problem=problems(), device=st.sampled_from(GPUS), invariant=st.booleans())
def test_plans_are_values(problem, device, invariant):
    profile = DeviceProfile.named(device)
    chosen = plan(problem, profile, batch_invariant=invariant)
    again = plan(replace(problem), profile, batch_invariant=invariant)
    assert chosen == again
    assert hash(chosen) == hash(again)
    restored = Plan.from_json(chosen.to_json())
    assert restored == chosen
    assert hash(restored) == hash(chosen)
    assert restored.to_json() == chosen.to_json()

    def leaves(value):
        return [leaf for item in value.values() for leaf in leaves(item)] if isinstance(value, dict) else [value]

    assert all(leaf is None or isinstance(leaf, (int, str)) for leaf in leaves(json.loads(chosen.to_json())))


def test_plans_are_frozen():
    chosen = plan(PROBLEM, DeviceProfile.named("h200"))
    with pytest.raises(FrozenInstanceError):
        chosen.splits = 3
    with pytest.raises(FrozenInstanceError):
        chosen.problem.window = 3


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "{", '{"problem": {}}', '{"problem": 3}'])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="text must be a plan as to_json writes it"):
        Plan.from_json(text)


OTHER = {
    "heads": 8, "kv_heads": 1, "k_dim": 128, "v_dim": 192, "window": 511, "block": 32, "query_len": 1,
    "dtype": "float16", "cache_dtype": "int8", "ragged": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_plan_for_another_problem_names_the_field(name):
    problem = replace(PROBLEM, max_tokens=None, **{"cache_dtype": None, name: OTHER[name]})
    with pytest.raises(ValueError, match=f"{name}="):
        plan(PROBLEM, DeviceProfile.named("h200")).check_serves(problem)


def test_every_field_of_a_problem_is_compared():
    compared = {*OTHER, "max_requests", "max_blocks", "max_tokens"}
    assert compared == {field.name for field in fields(Problem)}


@pytest.mark.parametrize("name", ["max_requests", "max_blocks"])
def test_a_plan_serves_what_is_smaller_and_refuses_what_is_larger(name):
    chosen = plan(PROBLEM, DeviceProfile.named("h200"))
    size = getattr(PROBLEM, name)
    for smaller in (0, 1, size):
        chosen.check_serves(replace(PROBLEM, max_tokens=None, **{name: smaller}))
    with pytest.raises(ValueError, match=f"{name} up to {size}, got {size + 1}"):
        chosen.check_serves(replace(PROBLEM, max_tokens=None, **{name: size + 1}))


def test_a_ragged_plan_refuses_more_tokens():
    problem = replace(PROBLEM, ragged=True, max_tokens=40)
    chosen = plan(problem, DeviceProfile.named("h200"))
    chosen.check_serves(replace(problem, max_tokens=39))
    with pytest.raises(ValueError, match="max_tokens up to 40, got 41"):
        chosen.check_serves(replace(problem, max_tokens=41))


@pytest.mark.parametrize("invariant", [False, True])
def test_an_empty_step_has_a_plan(invariant):
    chosen = plan(
        replace(PROBLEM, max_requests=0, max_tokens=None), DeviceProfile.named("h200"), batch_invariant=invariant
    )
    assert chosen.programs(0) == 0
    assert chosen.workspace_bytes == 0


WRONG = {
    "kernel": ("fast", ValueError), "pack": (3, ValueError), "splits": (0, ValueError), "tile": (48, ValueError),
    "warps": (3, ValueError), "stages": (0, ValueError), "chunk": (-1, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_illegal_plan_cannot_be_made(name):
    value, error = WRONG[name]
    with pytest.raises(error, match=f"{name} .*{value}"):
        replace(plan(PROBLEM, DeviceProfile.named("h200")), **{name: value})


def test_a_chunk_is_whole_tiles():
    with pytest.raises(ValueError, match="chunk must be a multiple of tile, got chunk=40 and tile=32"):
        replace(plan(PROBLEM, DeviceProfile.named("h200"), batch_invariant=True), tile=32, chunk=40)


def test_kernels_go_with_devices():
    gpu, cpu = DeviceProfile.named("h200"), DeviceProfile.named("cpu")
    assert plan(PROBLEM, gpu).kernel == "portable"
    assert plan(PROBLEM, cpu).kernel == "ops"
    assert plan(PROBLEM, cpu, kernel="interpret").kernel == "interpret"
    with pytest.raises(ValueError, match="kernel 'portable' needs a GPU, got device 'cpu'"):
        plan(PROBLEM, cpu, kernel="portable")


def test_unknown_devices():
    with pytest.raises(ValueError, match=r"name must be one of .*h200.*, got 'abacus'"):
        DeviceProfile.named("abacus")
    profile = DeviceProfile.for_cuda("NVIDIA Something New", 120, 84)
    assert (profile.capability, profile.num_sms, profile.shared_memory) == (120, 84, 99 << 10)
    assert plan(PROBLEM, profile).kernel == "portable"
    assert DeviceProfile.for_cuda("NVIDIA H200", 90, 132).name == "h200"
    assert DeviceProfile.for_cuda("NVIDIA A100-SXM4-80GB", 80, 108).name == "a100"
