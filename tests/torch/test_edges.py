"""What a review found to slip through: checks that a cache, a trace or another integer type went around."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swa_plan import DeviceProfile, Plan, Problem, cases, plan, reference
from swa_torch import PagedCache, append, merge_states, plan_for, swa_decode, swa_decode_gated
from tests.contract.backends import inputs_for, run, same_bits
from tests.contract.torch_runner import BACKENDS, INTERPRETED, device_of, to_numpy

LAYOUT = "pages kv_heads block (kv dim)"


def make(device="cpu", dtype=torch.float32, requests=2, heads=8, dim=32, seq_len=40):
    cache = PagedCache.empty(LAYOUT, pages=16, block=8, kv_heads=2, k_dim=dim, dtype=dtype, device=device)
    cache.bases[0].copy_(torch.randn(cache.bases[0].shape))
    query = torch.randn(requests, heads, dim).to(device, dtype)
    table = torch.arange(requests * 8, dtype=torch.int32, device=device).view(requests, 8)
    seq_lens = torch.full((requests,), seq_len, dtype=torch.int32, device=device)
    return query, cache, table, seq_lens


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_far_above_the_logits_is_the_lse(backend):
    query, cache, table, seq_lens = make(device_of(backend))
    sinks = torch.full((8,), 200.0, device=query.device)
    out, lse = swa_decode(query, cache, table, seq_lens, window=16, sinks=sinks, return_lse=True, backend=backend)
    assert (lse == 200.0).all()
    assert not out.any()
    gate = torch.full((2, 8), torch.nan, device=query.device)
    assert swa_decode(query, cache, table, seq_lens, window=16, sinks=sinks, gate=gate, backend=backend).isnan().all()


def test_an_invariant_plan_cannot_drop_chunks():
    problem = Problem(1, 8, 2, 32, 32, None, 8, 128)
    chosen = plan(problem, DeviceProfile.named("h200"), batch_invariant=True)
    with pytest.raises(ValueError, match=rf"splits must be at least {chosen.splits} .* got 1"):
        replace(chosen, splits=1)
    with pytest.raises(ValueError, match="splits must be at least"):
        Plan.from_json(chosen.text.replace(f'"splits": {chosen.splits}', '"splits": 2'))


def test_views_follow_their_memory():
    query, cache, table, seq_lens = make()
    first = swa_decode(query, cache, table, seq_lens, window=16)
    cache.bases[0].data = torch.zeros_like(cache.bases[0])
    append(cache, torch.ones(1, 2, 32), torch.ones(1, 2, 32), torch.tensor([39]))
    second = swa_decode(query, cache, table, seq_lens, window=16)
    fresh = swa_decode(query, PagedCache(cache.bases[0], LAYOUT), table, seq_lens, window=16)
    assert not torch.equal(first, second)
    assert torch.equal(second, fresh)


def test_an_overlap_is_seen_across_storages():
    query, cache, table, seq_lens = make()
    memory = np.zeros(3 * 8 * 32, np.float32)
    query = torch.from_numpy(memory[: 2 * 8 * 32]).view(2, 8, 32)
    out = torch.from_numpy(memory[8 * 32 :]).view(2, 8, 32)
    with pytest.raises(ValueError, match="out must not overlap an input, got an overlap with query"):
        swa_decode(query, cache, table, seq_lens, window=16, out=out)


def test_a_workspace_is_no_input():
    query, cache, table, seq_lens = make()
    memory = cache.bases[0].view(-1).view(torch.uint8)
    with pytest.raises(ValueError, match="workspace must not overlap an input, got an overlap with key_cache"):
        swa_decode(query, cache, table, seq_lens, window=16, workspace=memory[-memory.data_ptr() % 256 :])


@pytest.mark.parametrize("integer", [np.int64, np.int32])
def test_other_integers_count_as_integers(integer):
    query, cache, table, seq_lens = make(seq_len=37)
    expected = swa_decode(query, cache, table, seq_lens, window=29)
    given = swa_decode(query, cache, table, seq_lens, window=integer(29), query_len=integer(1))
    assert torch.equal(given, expected)
    chosen = plan_for(query, cache, table, window=integer(29), max_requests=integer(4))
    assert Plan.from_json(chosen.to_json()) == chosen


def test_a_window_beyond_every_position_is_none():
    query, cache, table, seq_lens = make()
    expected = swa_decode(query, cache, table, seq_lens, window=None)
    assert torch.equal(swa_decode(query, cache, table, seq_lens, window=2**70), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 1e-50}, "softcap must be positive"),
        ({"scale": 1e39}, "scale must be finite in float32"),
        ({"scale": 10**400}, "scale must be finite in float32"),
        ({"backend": ["cpu"]}, "backend must be one of"),
    ],
)
def test_numbers_that_fp32_does_not_hold(options, message):
    query, cache, table, seq_lens = make()
    with pytest.raises(ValueError, match=message):
        swa_decode(query, cache, table, seq_lens, window=16, **options)


def test_a_pair_is_no_plan():
    query, cache, table, seq_lens = make()
    with pytest.raises(TypeError, match="plan must be a Plan or None"):
        swa_decode(query, cache, table, seq_lens, window=16, plan=(2, 1))


def test_merge_states_takes_head_sizes_only():
    with pytest.raises(ValueError, match="v_dim must be at most 256, got 304"):
        merge_states(torch.zeros(2, 1, 4, 304), torch.zeros(2, 1, 4))


def test_validate_wants_a_tensor_first():
    _, cache, table, seq_lens = make()
    with pytest.raises(TypeError, match="query must be a torch tensor"):
        swa_decode([1.0], cache, table, seq_lens, window=16, validate=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda query: {"out": query}, "out must not overlap"),
        (lambda query: {"out": torch.empty_like(query, dtype=torch.float16), "out_dtype": torch.float32}, "dtype"),
        (lambda query: {"query_len": True}, "query_len must be an integer"),
    ],
)
def test_a_compiled_call_is_checked_like_an_eager_one(wrong, message):
    query, cache, table, seq_lens = make()

    def call(query):
        return swa_decode(query, cache, table, seq_lens, window=16, **wrong(query))

    with pytest.raises((TypeError, ValueError), match=message):
        call(query)
    with pytest.raises(Exception, match=message):
        torch.compile(call, backend="eager", fullgraph=True)(query)


def test_a_compiled_call_may_wrap_its_cache():
    query, cache, table, seq_lens = make()

    def call(base, query):
        return swa_decode(query, PagedCache(base, LAYOUT), table, seq_lens, window=16)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(cache.bases[0], query), call(cache.bases[0], query))


def test_a_compiled_original_call_wants_the_querys_dtype():
    query, cache, table, seq_lens = make()
    gate, output = torch.randn(2, 8), torch.empty(2, 8, 32, dtype=torch.float16)

    def call(query):
        swa_decode_gated(
            query, *cache.views(), table, seq_lens, gate, output, scale=1.0, window=16, query_len=1, splits=2
        )  # fmt: skip

    with pytest.raises(Exception, match="output must have dtype float32"):
        torch.compile(call, backend="eager", fullgraph=True)(query)


@pytest.mark.parametrize(
    ("name", "capability", "profile", "shared_memory"),
    [
        ("NVIDIA H200", 90, "h200", 227 << 10),
        ("NVIDIA RTX A1000", 86, "NVIDIA RTX A1000", 99 << 10),
        ("NVIDIA GeForce RTX 4090", 89, "rtx4090", 99 << 10),
    ],
)
def test_a_device_is_known_by_name_and_capability(name, capability, profile, shared_memory):
    device = DeviceProfile.for_cuda(name, capability, 20)
    assert (device.name, device.shared_memory, device.num_sms) == (profile, shared_memory, 20)


def test_a_packing_that_no_tile_can_hold_is_refused():
    problem = Problem(1, 16, 2, 256, 256, 512, 16, 64, query_len=8, dtype="float32")
    with pytest.raises(ValueError, match=r"pack must leave room .* got pack=8"):
        Plan.from_splits(problem, 1, 8)


def test_the_reference_agrees_on_a_large_sink():
    query, cache, table, seq_lens = make()
    arrays = [to_numpy(tensor) for tensor in (query, *cache.views(), table, seq_lens)]
    _, lse = reference.swa_decode(*arrays, window=16, sinks=np.full(8, 200.0), return_lse=True)
    assert np.allclose(lse, 200.0)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, which stands in for such a chip")
@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-verify-gate"])
def test_a_chip_without_fp8_reads_the_same_values(monkeypatch, name):
    from swa_torch._triton import _launch

    inputs = inputs_for(cases.by_name(name), "interpret", seed=8)
    expected = run(inputs, "interpret")
    monkeypatch.setattr(_launch, "device_profile", lambda device: DeviceProfile.named("a100"))
    cache = torch.zeros(1, dtype=torch.float8_e4m3fn)
    assert _launch.readable(cache, cache.device).dtype == torch.uint8
    out, lse = run(inputs, "interpret")
    assert same_bits(out, expected[0])
    assert lse is None or same_bits(lse, expected[1])


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_bytes_are_read_in_pairs_only_at_even_addresses(start, offset):
    """A storage that begins at an odd address has elements of no offset there."""
    pytest.importorskip("triton", reason="needs Triton")
    from swa_torch._triton import _launch

    memory = bytearray(4096)
    even = torch.frombuffer(memory, dtype=torch.int8).data_ptr() % 2
    storage = torch.frombuffer(memory, dtype=torch.int8, offset=even + start)
    cache = storage.as_strided((2, 8, 2, 32), (512, 64, 32, 1), offset)
    read, pairs = _launch.paired(cache, 32, torch.empty(1, dtype=torch.bfloat16))
    assert (pairs is not None) == (start % 2 == 0 and offset % 2 == 0)
    assert read.data_ptr() == cache.data_ptr()
