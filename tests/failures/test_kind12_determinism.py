"""Kind 12 of the known failures: a request's result does not depend on its neighbours, nor on the run."""

from __future__ import annotations

import numpy as np
import pytest

from swa_plan import DeviceProfile, Problem, plan, reference, swa_decode_plan, tolerance
from tests.contract.backends import BACKENDS, INTERPRETED, PLAIN, plan_for, same_bits
from tests.failures.probes import BF16_TOLERANCE, GROUP, KV_HEADS, decode, step, subset

BATCHES = (2, 5) if INTERPRETED else (2, 5, 9, 17, 64)


def neighbours(count: int) -> list[int]:
    """Return lengths of which the first is the request that is watched."""
    longest = 40 if INTERPRETED else 700
    return [700, *(int(n) for n in np.random.default_rng(count).integers(0, longest, count - 1))]


def kv_heads_of(backend: str, kv_heads: int) -> int:
    """Return one kv head where JAX interprets: each of them is a program more for every split of every request."""
    return 1 if backend == "jax-interpret" else kv_heads


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_change_no_bit_in_batch_invariant_mode(backend):
    """C89, sgl-project/sgl-flash-attn#43: alone and in batches of up to 64, first or last; by default it may drift."""
    assert [swa_decode_plan(batch, 8, 12, 1, 132, 512)[1] for batch in (1, 2, 5, 9, 17, 64)] == [8, 8, 4, 2, 1, 1]
    whole = step(neighbours(max(BATCHES)), kv_heads=kv_heads_of(backend, KV_HEADS))
    alone = subset(whole, [0])
    invariant, invariant_lse = decode(alone, backend, batch_invariant=True)
    default, _ = decode(alone, backend)
    tolerance.assert_close(invariant, alone, actual_lse=invariant_lse)
    fixed = plan_for(whole, backend, splits=8)
    alone_fixed, _ = decode(alone, backend, plan=fixed)
    for batch in BATCHES:
        order = list(range(batch))[:: 1 if batch % 2 else -1]
        inputs, row = subset(whole, order), order.index(0)
        out, lse = decode(inputs, backend, batch_invariant=True)
        assert same_bits(out[row : row + 1], invariant), batch
        assert same_bits(lse[row : row + 1], invariant_lse), batch
        drift = decode(inputs, backend)[0][row].astype(np.float32) - default[0].astype(np.float32)
        assert np.abs(drift).max() <= BF16_TOLERANCE, batch
        if backend not in PLAIN:  # their matrix products have the batch's shape
            assert same_bits(decode(inputs, backend, plan=fixed)[0][row : row + 1], alone_fixed), batch


@pytest.mark.parametrize("query_len", [1, 4])
def test_batch_invariant_plan_ignores_the_batch(query_len):
    """C89, sgl-project/sgl-flash-attn#43: neither splits nor tile follow the number of requests; by default they do."""
    h200 = DeviceProfile.named("h200")

    def choices(requests: int, **options) -> tuple[int, ...]:
        made = plan(Problem(requests, 96, 8, 192, 192, 512, 16, 64, query_len=query_len), h200, **options)
        return made.pack, made.splits, made.tile, made.warps, made.stages, made.chunk

    batches = (1, 2, 5, 9, 17, 64, 1000)
    assert len({choices(batch, batch_invariant=True) for batch in batches}) == 1
    assert len({choices(batch) for batch in batches}) > 1


SPLITS = (1, 2, 4, 8)
MANY, LENGTHS = (4, (0, 530, 100)) if INTERPRETED else (64, (0, 700, 1200))


@pytest.mark.parametrize("query_len, pack", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pack_and_split_is_right_at_every_batch(backend, query_len, pack):
    """C93, NVIDIA/TensorRT-LLM#18244: no kernel path is reached only by a size that nobody tests."""
    lengths = np.random.default_rng(query_len).integers(0, LENGTHS[2], MANY)
    lengths[:3] = LENGTHS
    kv_heads = kv_heads_of(backend, min(KV_HEADS, 2))
    whole = step(lengths, query_len=query_len, k_dim=64, kv_heads=kv_heads)
    few = subset(whole, [0, 1, MANY - 1])
    single = subset(whole, [1])
    expected = reference.swa_decode(*whole.arrays(), window=512, query_len=query_len)
    for splits in SPLITS:
        chosen = plan_for(whole, backend, splits=splits, pack=pack)
        assert (chosen.splits, chosen.pack) == (splits, pack)
        out, _ = decode(whole, backend, plan=chosen)
        assert np.abs(out.astype(np.float64) - expected).max() <= BF16_TOLERANCE
        rows = out.reshape(MANY, query_len, GROUP * kv_heads, 64)
        one, one_lse = decode(single, backend, plan=chosen)
        if splits == 1 or backend not in PLAIN:  # plain operations do not split
            tolerance.assert_close(one, single, actual_lse=one_lse)
            tolerance.assert_close(rows[[0, 1, MANY - 1]].reshape(-1, *rows.shape[2:]), few)
        if backend not in PLAIN:
            assert same_bits(rows[1], one)
