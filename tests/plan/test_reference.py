"""The reference against values that a person can compute, and against the rules that the contract states."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from swa_plan import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
DIM = 4


def decode(values, seq_lens, *, keys=None, query=None, query_len=1, rows=None, block=16, columns=None, **options):
    """Decode with q = 0 unless given and one kv head; ``values`` is ``[positions]``, the same for every request."""
    values = np.asarray(values, np.float64)
    columns = columns or -(-len(values) // block)
    requests = len(seq_lens)
    cache = np.full((requests * columns, block, 1, DIM), np.nan)
    table = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns)
    key_cache, value_cache = cache.copy(), cache.copy()
    keys = np.zeros(len(values)) if keys is None else np.asarray(keys)
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        page, offset = table[:, position // block], position % block
        key_cache[page, offset], value_cache[page, offset] = key, value
    tokens = requests * query_len if rows is None else rows
    queries = np.full((tokens, 1, DIM), 0.0 if query is None else query)
    lens = np.array(seq_lens, np.int32)
    out, lse = reference.swa_decode(
        queries, key_cache, value_cache, table, lens, query_len=query_len, return_lse=True, **options
    )
    np.testing.assert_array_equal(out, np.broadcast_to(out[..., :1], out.shape))
    return out[:, 0, 0], lse[:, 0]


def one_hot(length, position):
    return (np.arange(length) == position).astype(float)


class TestWindow:
    @pytest.mark.parametrize("probe, right", [(-511, [1 / 511, 1 / 512, 1 / 512, 1 / 512]), (-512, [0, 0, 0, 0])])
    def test_window_counts_the_query_c01(self, probe, right):
        for seq_len, expected in zip((511, 512, 513, 514), right, strict=True):
            position = max(seq_len - 1 + probe, 0) if probe == -511 else seq_len - 1 + probe
            out, lse = decode(one_hot(514, position), [seq_len], window=512)
            assert out[0] == pytest.approx(expected, rel=1e-15)
            assert lse[0] == pytest.approx(math.log(min(seq_len, 512)))

    def test_first_visible_key_c02(self):
        assert decode(one_hot(40, 32), [40], window=8, block=4)[0] == [1 / 8]
        assert decode(one_hot(40, 31), [40], window=8, block=4)[0] == [0]

    def test_long_window_keeps_its_oldest_key_c03(self):
        assert decode(one_hot(5000, 904), [5000], window=4096)[0] == [2**-12]
        assert decode(one_hot(5000, 903), [5000], window=4096)[0] == [0]
        assert decode(np.ones(5000), [5000], window=4096)[0] == pytest.approx([1.0], rel=1e-14)

    def test_scale_zero_is_a_scale_c08(self):
        keys = np.random.default_rng(1).normal(size=16)
        assert decode(one_hot(16, 3), [16], window=16, keys=keys, query=10.0, scale=0.0)[0] == [1 / 16]

    @pytest.mark.parametrize("window", [4096, 4, None])
    def test_query_is_right_aligned_c09(self, window):
        assert [decode(one_hot(4, e), [4], window=window)[0][0] for e in range(4)] == [0.25] * 4

    def test_window_is_applied_c11(self):
        assert [decode(one_hot(600, e), [600], window=512)[0][0] for e in (0, 87, 88)] == [0, 0, 1 / 512]

    def test_window_of_one_sees_the_row_itself(self):
        out, lse = decode(np.arange(20.0), [20], window=1)
        assert (out[0], lse[0]) == (19.0, 0.0)


class TestRows:
    """Verify rows: each has its own position and window."""

    @pytest.mark.parametrize("probe", range(84, 90))
    def test_each_row_has_its_own_start_c73(self, probe):
        out, _ = decode(one_hot(600, probe), [600], window=512, query_len=4)
        np.testing.assert_array_equal(out, [1 / 512 if probe >= 85 + row else 0 for row in range(4)])

    @pytest.mark.parametrize("probe", [297, 298, 299])
    def test_no_row_sees_the_future_c78(self, probe):
        out, _ = decode(one_hot(300, probe), [300], window=128, query_len=4)
        np.testing.assert_array_equal(out, [1 / 128 if probe <= 296 + row else 0 for row in range(4)])

    def test_rows_before_the_start_see_nothing_c15(self):
        out, lse = decode([3.0, 5.0], [2], window=512, query_len=4)
        np.testing.assert_array_equal(out, [0, 0, 3, 4])
        np.testing.assert_allclose(lse, [-np.inf, -np.inf, 0, math.log(2)])

    def test_gate_is_per_row_and_head_c76(self):
        heads, group, tokens = 24, 12, 4
        gate = (0.01 * (heads * np.arange(tokens)[:, None] + np.arange(heads)) - 2).astype(np.float32)
        cache = np.ones((3, 16, heads // group, DIM), np.float32)
        out = reference.swa_decode(
            np.zeros((tokens, heads, DIM), np.float32),
            cache,
            cache,
            np.array([[2, 0, 1]]),
            np.array([40]),
            window=32,
            query_len=4,
            gate=gate,
        )
        right = 1 / (1 + np.exp(-gate.astype(np.float64)))
        np.testing.assert_allclose(out, np.broadcast_to(right[..., None], out.shape), rtol=1e-14)

    def test_query_head_reads_its_kv_head_c57(self):
        values = np.broadcast_to(np.arange(1.0, 3.0)[:, None], (1, 16, 2, DIM))
        query = np.zeros((1, 48, DIM))
        out = reference.swa_decode(query, np.zeros_like(values), values, np.array([[0]]), np.array([9]), window=8)
        np.testing.assert_allclose(out[0, :, 0], np.repeat([1.0, 2.0], 24))

    def test_ragged_rows_with_padding(self):
        out, lse = decode(
            np.arange(10.0),
            [10, 7, 5],
            window=2,
            query_len=2,
            rows=5,
            cu_query_lens=np.array([0, 2, 2, 3], np.int32),
        )
        np.testing.assert_array_equal(out, [7.5, 8.5, 3.5, 0, 0])
        np.testing.assert_allclose(lse, [*[math.log(2)] * 3, -np.inf, -np.inf])

    def test_a_request_above_the_bound_is_nan_alone(self):
        gate = np.full((5, 1), 30.0)
        gate[4] = np.nan
        out, lse = decode(
            np.arange(10.0), [10, 0, 5], window=1, query_len=1, rows=5, cu_query_lens=np.array([0, 1, 3, 4]), gate=gate
        )
        np.testing.assert_allclose(out, [9, np.nan, np.nan, 4, 0])
        np.testing.assert_array_equal(lse, [0, np.nan, np.nan, 0, -np.inf])


class TestEmpty:
    def test_lengths_of_nothing_one_and_window_plus_one_c13(self):
        values = np.random.default_rng(2).normal(size=513)
        out, lse = decode(values, [0, 1, 513], window=512)
        np.testing.assert_allclose(out, [0, values[0], values[1:].mean()])
        np.testing.assert_allclose(lse, [-np.inf, 0, math.log(512)])

    def test_padding_is_zero_with_nan_gate_and_sink_c25(self):
        out, lse = decode(
            np.ones(20), [0, 5, -7], window=16, gate=np.array([[np.nan], [0.0], [np.nan]]), sinks=np.array([1.0])
        )
        np.testing.assert_allclose(out, [0, 0.5 * 5 / (5 + math.e), 0])
        np.testing.assert_allclose(lse, [-np.inf, math.log(5 + math.e), -np.inf])

    def test_all_logits_minus_infinity_count_as_nothing_seen(self):
        out, lse = decode([np.nan, 1.0], [2], window=2, keys=[-np.inf, -np.inf], query=1.0, sinks=np.array([3.0]))
        assert (out[0], lse[0]) == (0.0, -np.inf)

    def test_ranges_cut_keys_without_moving_rows(self):
        values = np.arange(50.0)
        options = {"kv_start": np.array([31, -9], np.int32), "kv_end": np.array([48, 2**31 - 1], np.int32)}
        out, _ = decode(values, [50, 3], window=20, query_len=4, **options)
        right = [values[31:47].mean(), values[31:48].mean(), values[31:48].mean(), values[31:48].mean(), 0, 0, 0.5, 1]
        np.testing.assert_allclose(out, right)
        options = {"kv_start": np.array([20, 30]), "kv_end": np.array([20, 10])}
        np.testing.assert_array_equal(decode(values, [50, 50], window=64, **options)[1], [-np.inf] * 2)


class TestScores:
    def test_four_equal_scores_have_lse_ln_4_c22(self):
        assert decode(np.ones(4), [4], window=9)[1] == pytest.approx([math.log(4)])

    def test_large_scores_c65(self):
        keys = np.full(64, -100.0)
        keys[7] = 100.0
        out, lse = decode(np.arange(64.0), [64], window=64, keys=keys, query=100.0, scale=192**-0.5 * 192 / DIM)
        assert out[0] == 7.0
        assert lse[0] == pytest.approx(138564.06, abs=0.01)

    def test_low_scores_do_not_lose_to_masked_keys_c72(self):
        keys, values = np.full(528, 0.0), np.full(528, 7.0)
        keys[8:520], values[8:520] = -100.0, 1.0
        assert decode(values, [520], window=512, keys=keys, query=100.0)[0] == [1.0]

    def test_softcap_and_scale_in_order(self):
        logits = 5.0 * np.tanh(0.25 * DIM * 3.0 * np.array([1.0, -2.0]) / 5.0)
        out, lse = decode([1.0, 0.0], [2], window=2, keys=[1.0, -2.0], query=3.0, scale=0.25, softcap=5.0)
        assert out[0] == pytest.approx(1 / (1 + math.exp(logits[1] - logits[0])))
        assert lse[0] == pytest.approx(math.log(np.exp(logits).sum()))

    def test_sinks_are_neither_scaled_nor_capped(self):
        out, lse = decode(np.ones(3), [3], window=3, sinks=np.array([2.0]), scale=0.5, softcap=1.0)
        assert out[0] == pytest.approx(3 / (3 + math.exp(2)))
        assert lse[0] == pytest.approx(math.log(3 + math.exp(2)))

    def test_a_huge_sink_does_not_overflow(self):
        out, lse = decode(np.ones(3), [3], window=3, sinks=np.array([1e4]))
        assert (out[0], lse[0]) == (0.0, 1e4)

    @pytest.mark.parametrize(
        "gate, factor", [(-np.inf, 0), (-20, 2.0611536181902037e-9), (0, 0.5), (2, 0.8807970779778823), (np.inf, 1)]
    )
    def test_gate_is_a_sigmoid_c71(self, gate, factor):
        out, lse = decode(np.ones(4), [4], window=4, gate=np.array([[gate]]))
        assert out[0] == pytest.approx(factor, rel=1e-14)
        assert lse[0] == pytest.approx(math.log(4)), "the LSE is not gated"

    @pytest.mark.parametrize("dtype", [E4M3, E5M2, np.dtype(np.int8)])
    def test_quantised_scales_c64(self, dtype):
        stored = np.ones((1, 8, 2, DIM), dtype)
        query = np.ones((1, 2, DIM))
        out, lse = reference.swa_decode(
            query,
            stored,
            stored,
            np.array([[0]]),
            np.array([8]),
            window=8,
            k_scale=np.array([0.5, 4.0], np.float32),
            v_scale=2.0,
            return_lse=True,
        )
        np.testing.assert_array_equal(out, np.full((1, 2, DIM), 2.0))
        np.testing.assert_allclose(lse, [[math.log(8) + 0.5 * 2, math.log(8) + 4 * 2]])


class TestUnreadable:
    def test_invalid_pages_spoil_the_rows_that_see_them_only(self):
        cache = np.ones((4, 2, 1, DIM))
        table = np.array([[0, -1], [-1, 1], [2, 4], [3, 2**31 - 1]], np.int32)
        gate = np.zeros((4, 1))
        out, lse = reference.swa_decode(
            np.zeros((4, 1, DIM)),
            cache,
            cache,
            table,
            np.array([3, 4, 3, 2], np.int32),
            window=2,
            gate=gate,
            return_lse=True,
        )
        np.testing.assert_array_equal(out[:, 0, 0], [np.nan, 0.5, np.nan, 0.5])
        np.testing.assert_array_equal(np.isnan(lse[:, 0]), [True, False, True, False])

    @pytest.mark.parametrize("window", [2, None])
    def test_positions_beyond_the_table(self, window):
        out, _ = decode(np.ones(8), [8, 9, 2**31 - 1], window=window, block=4)
        np.testing.assert_array_equal(out, [1, np.nan, np.nan])

    def test_earlier_rows_still_end_within_the_table(self):
        np.testing.assert_array_equal(decode(np.ones(8), [9], window=4, block=4, query_len=2)[0], [1, np.nan])


class TestAppend:
    def test_slots_outside_the_cache_write_nothing(self):
        cache = np.zeros((2, 3, 1, DIM), np.float32)
        rows = np.arange(1.0, 6.0, dtype=np.float32)[:, None, None] * np.ones((1, 1, DIM), np.float32)
        keys, values = reference.append(cache, cache, rows, -rows, np.array([4, -1, 6, 0]))
        np.testing.assert_array_equal(keys[..., 0, 0], [[4, 0, 0], [0, 1, 0]])
        np.testing.assert_array_equal(values, -keys)
        assert not cache.any(), "the input is left alone"

    @pytest.mark.parametrize(
        "dtype, x, stored",
        [
            (E4M3, [500, -np.inf, 17, 19, np.nan, 0.0009765625], [448, -448, 16, 20, np.nan, 0]),
            (E5M2, [6e4, np.inf, 9, 11, np.nan, -1e9], [57344, 57344, 8, 12, np.nan, -57344]),
            (np.dtype(np.int8), [300, -np.inf, 0.5, 1.5, np.nan, -2.5], [127, -127, 0, 2, 0, -2]),
        ],
    )
    def test_clip_then_round_half_to_even(self, dtype, x, stored):
        x = np.array(x, np.float32).reshape(-1, 1, 1) * np.float32(0.5)
        cache = np.zeros((1, 6, 1, 1), dtype)
        keys, _ = reference.append(cache, cache, x, x, np.arange(6, dtype=np.int32), k_scale=0.5, v_scale=1.0)
        np.testing.assert_array_equal(keys[0, :, 0, 0].astype(np.float64), stored)

    def test_the_quotient_is_float32(self):
        # 0.35 / 0.1, both float32, is 3.5 in float32 and less in float64.
        x = np.full((1, 1, 1), 0.35, np.float32)
        cache = np.zeros((1, 1, 1, 1), np.int8)
        keys, _ = reference.append(cache, cache, x, x, np.array([0]), k_scale=0.1, v_scale=[0.1])
        assert keys.item() == 4

    def test_an_unquantised_cache_keeps_bits(self):
        x = np.array([np.inf, -np.inf, np.nan, 3.140625, -0.0], BF16).reshape(-1, 1, 1)
        cache = np.zeros((1, 5, 1, 1), BF16)
        keys, _ = reference.append(cache, cache, x, x, np.arange(5))
        np.testing.assert_array_equal(keys.reshape(-1).view(np.uint16), x.reshape(-1).view(np.uint16))


class TestMerge:
    def test_natural_log_c22(self):
        out, lse = reference.merge_states(np.array([0.0, 10.0]).reshape(2, 1, 1, 1), np.log([2, 8]).reshape(2, 1, 1))
        assert out.item() == pytest.approx(8.0)
        assert lse.item() == pytest.approx(math.log(10))

    @pytest.mark.parametrize("fill", [np.nan, 0.0])
    @pytest.mark.parametrize("extra", [{}, {"sinks": [5.0]}, {"gate": [[np.nan]]}])
    def test_empty_parts_merge_to_nothing_c12(self, fill, extra):
        out, lse = reference.merge_states(np.full((2, 1, 1, 3), fill), np.full((2, 1, 1), -np.inf), **extra)
        np.testing.assert_array_equal(out, np.zeros((1, 1, 3)))
        assert lse.item() == -np.inf

    def test_an_empty_part_is_the_identity(self):
        out, lse = reference.merge_states(np.array([np.nan, 3.0]).reshape(2, 1, 1, 1), [[[-np.inf]], [[0.7]]])
        assert (out.item(), lse.item()) == (3.0, 0.7)

    def test_shards_of_the_context_merge_to_the_whole(self):
        rng = np.random.default_rng(3)
        cache = rng.normal(size=(2, 10, 16, 2, DIM))
        query, gate, sinks = rng.normal(size=(4, 6, DIM)), rng.normal(size=(4, 6)), rng.normal(size=6)
        arguments = (query, *cache, rng.permutation(10).reshape(2, 5), np.array([70, 2]))
        options = {"window": 40, "query_len": 2}
        whole = reference.swa_decode(*arguments, **options, gate=gate, sinks=sinks, return_lse=True)
        parts = [
            reference.swa_decode(
                *arguments, **options, kv_start=np.array([low] * 2), kv_end=np.array([high] * 2), return_lse=True
            )
            for low, high in ((0, 32), (32, 60), (60, 200))
        ]
        outs, lses = zip(*parts, strict=True)
        for merged, right in zip(reference.merge_states(outs, lses, sinks=sinks, gate=gate), whole, strict=True):
            np.testing.assert_allclose(merged, right, rtol=1e-12)


def valid_call(**changes):
    cache = np.zeros((2, 4, 2, DIM), np.float32)
    arguments = {
        "query": np.zeros((2, 4, DIM), np.float32),
        "key_cache": cache,
        "value_cache": cache,
        "block_table": np.zeros((2, 1), np.int32),
        "seq_lens": np.ones(2, np.int32),
        "window": 4,
    }
    return reference.swa_decode(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"window": True}, TypeError, "window .*True"),
        ({"window": 4.0}, TypeError, "window .*4.0"),
        ({"window": 0}, ValueError, "window .*0"),
        ({"window": -1}, ValueError, "window .*-1"),
        ({"query": np.zeros((2, 5, DIM))}, ValueError, "heads .*5 and kv_heads=2"),
        ({"query": np.zeros((2, 4, DIM + 1))}, ValueError, r"key_cache .*5.*\(2, 4, 2, 4\)"),
        ({"query": np.zeros((3, 4, DIM))}, ValueError, "query .*2 \\* 1.*got 3"),
        ({"query_len": 0}, ValueError, "query_len .*0"),
        ({"value_cache": np.zeros((3, 4, 2, DIM), np.float32)}, ValueError, "value_cache"),
        ({"value_cache": np.zeros((2, 4, 2, DIM), np.float16)}, TypeError, "value_cache .*float16"),
        ({"block_table": np.zeros((2, 1))}, TypeError, "block_table .*float64"),
        ({"seq_lens": np.ones(3, np.int32)}, ValueError, r"seq_lens .*\(3,\)"),
        ({"scale": math.nan}, ValueError, "scale .*nan"),
        ({"scale": True}, TypeError, "scale .*True"),
        ({"softcap": 0.0}, ValueError, "softcap .*0.0"),
        ({"gate": np.zeros((2, 3))}, ValueError, r"gate .*\(2, 3\)"),
        ({"sinks": np.zeros(2)}, ValueError, r"sinks .*\(2,\)"),
        ({"k_scale": np.ones(3)}, ValueError, r"k_scale .*\(3,\)"),
        ({"kv_start": np.zeros(2)}, TypeError, "kv_start .*float64"),
        ({"cu_query_lens": np.array([0, 2, 1])}, ValueError, r"cu_query_lens .*\[0, 2, 1\]"),
        ({"cu_query_lens": np.array([0, 1, 3])}, ValueError, r"cu_query_lens .*\[0, 1, 3\]"),
    ],
)
def test_errors_name_argument_and_value(changes, error, words):
    with pytest.raises(error, match=words):
        valid_call(**changes)


def test_quantised_caches_need_scales_and_uint8_is_no_cache():
    cache = np.zeros((2, 4, 2, DIM), E4M3)
    with pytest.raises(ValueError, match="k_scale and v_scale must be given"):
        valid_call(key_cache=cache, value_cache=cache, k_scale=1.0)
    with pytest.raises(TypeError, match=r"uint8.*view"):
        valid_call(key_cache=cache.view(np.uint8), value_cache=cache.view(np.uint8))


def test_zero_sizes():
    out = valid_call(
        query=np.zeros((0, 4, DIM)), block_table=np.zeros((0, 4), np.int32), seq_lens=np.zeros(0, np.int32)
    )
    assert out.shape == (0, 4, DIM)
