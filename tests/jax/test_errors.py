"""Wrong arguments: the right exception, a message that names argument and value, and nothing written or returned.

One table of wrong calls. Each gets a fresh world of valid arguments and changes what is wrong. A child process started
with ``python -O`` repeats the table, because no check may hang on an ``assert``.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_pallas import (
    PagedCache,
    append,
    cache_specs,
    check_inputs,
    merge_states,
    plan_for,
    swa_decode,
    swa_decode_gated,
    warmup,
)
from swa_plan import DeviceProfile
from tests.jax.helpers import LAYERS, make_step, normal, same_bits, specs

PAIR = "pages block kv_heads dim"


class World:
    """Valid arguments of every entry point."""

    def __init__(self, layout: str = PAIR) -> None:
        self.step = make_step(layout=layout)
        self.query, self.cache, self.table, self.lengths = self.step
        self.gate, self.sinks = normal(4, 4), normal(4)
        self.key, self.value = normal(4, 2, 32, seed=1), normal(4, 2, 32, seed=2)
        self.slots = i32(0, 17, 30, 5)
        self.outs, self.lses = normal(2, 4, 4, 32), normal(2, 4, 4)

    def decode(self, **changed: Any) -> Any:
        """Call ``swa_decode`` with some arguments changed."""
        arguments = {
            "query": self.query, "cache": self.cache, "block_table": self.table, "seq_lens": self.lengths,
            "window": 16, **changed,
        }  # fmt: skip
        return swa_decode(**arguments)

    def gated(self, **changed: Any) -> Any:
        """Call ``swa_decode_gated`` with some arguments changed."""
        arguments = {
            "query": self.query, "key_cache": self.cache.bases[0], "value_cache": self.cache.bases[1],
            "block_table": self.table, "seq_lens": self.lengths, "gate": self.gate, "scale": 0.125, "window": 16,
            "query_len": 1, "splits": 2, **changed,
        }  # fmt: skip
        return swa_decode_gated(**arguments)

    def append(self, **changed: Any) -> Any:
        """Call ``append`` with some arguments changed."""
        arguments = {
            "cache": self.cache, "key": self.key, "value": self.value, "slot_mapping": self.slots, **changed
        }  # fmt: skip
        return append(**arguments)

    def merge(self, **changed: Any) -> Any:
        """Call ``merge_states`` with some arguments changed."""
        return merge_states(**{"outs": self.outs, "lses": self.lses, **changed})

    def plan(self, **changed: Any) -> Any:
        """Call ``plan_for`` with some arguments changed."""
        arguments = {"query": self.query, "cache": self.cache, "block_table": self.table, "window": 16, **changed}
        return plan_for(**{"backend": "xla", **arguments})

    def check(self, **changed: Any) -> None:
        """Call ``check_inputs`` with some arguments changed."""
        arguments = {
            "cache": self.cache, "block_table": self.table, "seq_lens": self.lengths, "window": 16, **changed
        }  # fmt: skip
        check_inputs(**arguments)

    def quantised(self, dtype: str = "int8") -> tuple[jax.Array, jax.Array]:
        """Return a cache of another dtype, as a tuple."""
        zeros = jnp.zeros(self.cache.bases[0].shape, jnp.dtype(dtype))
        return zeros, zeros


class Wrong(NamedTuple):
    """A call that must raise ``error`` with a message that contains every one of ``says``."""

    call: Callable[[World], Any]
    error: type[Exception]
    says: tuple[str, ...]


def i32(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def wide(array: jax.Array) -> np.ndarray:
    """Return NumPy's int64 of an array, which JAX would narrow without a word while x64 is off."""
    return np.asarray(array).astype(np.int64)


def traced(call: Callable[[Any], Any], value: Any) -> Any:
    """Make a call with one value traced."""
    return jax.jit(call)(value)


VALUES = {
    # name: (argument, value, error, further words of the message)
    "scale-nan": ("scale", float("nan"), ValueError, "finite in float32, got nan"),
    "scale-inf": ("scale", float("inf"), ValueError, "finite in float32, got inf"),
    "scale-beyond-float32": ("scale", 1e39, ValueError, "finite in float32, got 1e+39"),
    "scale-bool": ("scale", True, TypeError, "must be a number, got True"),
    "scale-string": ("scale", "1", TypeError, "must be a number, got '1'"),
    "scale-shape": ("scale", jnp.ones(1), ValueError, "shape [], got [1]"),
    "scale-dtype": ("scale", np.array(True), TypeError, "got bool"),
    "scale-wide": ("scale", np.array(1.0), TypeError, "must be float32 while jax_enable_x64 is off, got float64"),
    "softcap-nan": ("softcap", float("nan"), ValueError, "got nan"),
    "softcap-inf": ("softcap", float("inf"), ValueError, "got inf"),
    "softcap-zero": ("softcap", 0.0, ValueError, "positive (at least 1.18e-38), got 0.0"),
    "softcap-negative": ("softcap", -1.0, ValueError, "positive (at least 1.18e-38), got -1.0"),
    "softcap-bool": ("softcap", False, TypeError, "must be a number, got False"),
    "softcap-shape": ("softcap", jnp.ones((1, 1)), ValueError, "shape [], got [1, 1]"),
    "window-zero": ("window", 0, ValueError, "at least 1 (it counts the query's own position; None means full"),
    "window-negative": ("window", -1, ValueError, "got -1"),
    "window-bool": ("window", True, TypeError, "got True of type bool"),
    "window-float": ("window", 16.0, TypeError, "got 16.0 of type float"),
    "window-array": ("window", i32(16), TypeError, "must be an integer"),
    "query_len-zero": ("query_len", 0, ValueError, "at least 1, got 0"),
    "query_len-bool": ("query_len", True, TypeError, "must be an integer, got True"),
    "query_len-float": ("query_len", 1.0, TypeError, "must be an integer, got 1.0"),
    "k_scale-nan": ("k_scale", float("nan"), ValueError, "finite in float32, got nan"),
    "v_scale-inf": ("v_scale", float("inf"), ValueError, "finite in float32, got inf"),
    "k_scale-bool": ("k_scale", True, TypeError, "must be a number, got True"),
    "v_scale-list": ("v_scale", [1.0, 1.0], TypeError, "must be a number, got [1.0, 1.0]"),
    "k_scale-shape": ("k_scale", jnp.ones(3), ValueError, "shape [2] (kv_heads), got [3]"),
    "v_scale-2d": ("v_scale", jnp.ones((2, 1)), ValueError, "got [2, 1]"),
    "k_scale-dtype": ("k_scale", jnp.ones(2, jnp.float16), TypeError, "must have dtype float32, got float16"),
    "v_scale-wide": ("v_scale", np.ones(2), TypeError, "must have dtype float32, got float64"),
    "v_scale-wide-scalar": ("v_scale", np.array(1.0), TypeError, "must be float32 while jax_enable_x64 is off"),
    "out_dtype-fp8": ("out_dtype", jnp.float8_e5m2, TypeError, "bfloat16, float16, float32, got float8_e5m2"),
    "out_dtype-unknown": ("out_dtype", "float31", TypeError, "got 'float31'"),
    "out_dtype-wide": ("out_dtype", jnp.float64, TypeError, "got float64"),
    "backend-unknown": ("backend", "cuda", ValueError, "must be one of pallas_triton, xla, interpret, got 'cuda'"),
    "backend-kind": ("backend", ["xla"], ValueError, "got ['xla']"),
    "backend-kernel-on-cpu": ("backend", "pallas_triton", ValueError, "'pallas_triton'"),
    "plan-kind": ("plan", "fast", TypeError, "must be a Plan or None, got str"),
    "layer-superfluous": ("layer", 0, ValueError, "must be left out for layout 'pages block kv_heads dim', got 0"),
}

ARRAYS = {
    # name: (argument, value made from the world, error, further words of the message)
    "query-kind": ("query", lambda w: w.query.tolist(), TypeError, "must be a JAX array, got list"),
    "query-dtype": ("query", lambda w: w.query.astype(jnp.int32), TypeError, "bfloat16, float16, float32, got int32"),
    "query-wide": ("query", lambda w: np.asarray(w.query).astype(np.float64), TypeError, "got float64"),
    "query-2d": ("query", lambda w: w.query[0], ValueError, "must have 3 dims, got shape [4, 32]"),
    "query-tokens": ("query", lambda w: w.query[:3], ValueError, "4 * 1 tokens (or pass cu_query_lens), got 3"),
    "query-without-data": ("query", lambda w: specs(w.query), TypeError, "must hold data"),
    "table-kind": ("block_table", lambda w: w.table.tolist(), TypeError, "must be a JAX array, got list"),
    "table-dtype": ("block_table", lambda w: w.table.astype(jnp.float32), TypeError, "int32, int64, got float32"),
    "table-int16": ("block_table", lambda w: w.table.astype(jnp.int16), TypeError, "int32, int64, got int16"),
    "table-uint32": ("block_table", lambda w: w.table.astype(jnp.uint32), TypeError, "int32, int64, got uint32"),
    "table-1d": ("block_table", lambda w: w.table[0], ValueError, "[requests, max_blocks], got shape [3]"),
    "table-without-data": ("block_table", lambda w: specs(w.table), TypeError, "must hold data"),
    "seq_lens-none": ("seq_lens", lambda w: None, TypeError, "must be a JAX array, got NoneType"),
    "seq_lens-dtype": ("seq_lens", lambda w: w.lengths.astype(jnp.float32), TypeError, "got float32"),
    "seq_lens-shape": ("seq_lens", lambda w: w.lengths[:3], ValueError, "must have shape [4], got [3]"),
    "seq_lens-2d": ("seq_lens", lambda w: w.lengths[:, None], ValueError, "must have shape [4], got [4, 1]"),
    "cu_query_lens-shape": ("cu_query_lens", lambda w: i32(0, 1, 2, 3), ValueError, "must have shape [5], got [4]"),
    "cu_query_lens-dtype": ("cu_query_lens", lambda w: jnp.zeros(5), TypeError, "got float32"),
    "cu_query_lens-list": ("cu_query_lens", lambda w: [0, 1, 2, 3, 4], TypeError, "got list"),
    "kv_start-shape": ("kv_start", lambda w: i32(0, 0, 0), ValueError, "must have shape [4], got [3]"),
    "kv_start-number": ("kv_start", lambda w: 3, TypeError, "must be a JAX array, got int"),
    "kv_end-dtype": ("kv_end", lambda w: jnp.zeros(4), TypeError, "got float32"),
    "kv_end-shape": ("kv_end", lambda w: i32(0)[0], ValueError, "must have shape [4], got []"),
    "gate-shape": ("gate", lambda w: w.gate[:, :2], ValueError, "must have shape [4, 4], got [4, 2]"),
    "gate-3d": ("gate", lambda w: w.gate[..., None], ValueError, "got [4, 4, 1]"),
    "gate-dtype": ("gate", lambda w: np.zeros((4, 4)), TypeError, "got float64"),
    "gate-kind": ("gate", lambda w: 0.0, TypeError, "must be a JAX array, got float"),
    "sinks-shape": ("sinks", lambda w: w.sinks[:2], ValueError, "must have shape [4], got [2]"),
    "sinks-2d": ("sinks", lambda w: w.sinks[None], ValueError, "must have shape [4], got [1, 4]"),
    "sinks-dtype": ("sinks", lambda w: i32(0, 0, 0, 0), TypeError, "got int32"),
    "cache-kind": ("cache", lambda w: w.cache.bases[0], TypeError, "(key_cache, value_cache) tuple, got ArrayImpl"),
    "cache-three": ("cache", lambda w: (*w.cache.bases, w.query), TypeError, "tuple, got tuple"),
    "cache-none": ("cache", lambda w: None, TypeError, "got NoneType"),
    "cache-without-data": ("cache", lambda w: specs(w.cache), TypeError, "must hold data"),
    "table-int64": ("block_table", lambda w: wide(w.table), TypeError, "must be int32 while jax_enable_x64 is off"),
    "seq_lens-int64": ("seq_lens", lambda w: wide(w.lengths), TypeError, "must be int32 while jax_enable_x64 is off"),
    "cu_query_lens-int64": ("cu_query_lens", lambda w: wide(i32(0, 1, 2, 3, 4)), TypeError, "x64 is off, got int64"),
    "kv_start-int64": ("kv_start", lambda w: wide(w.lengths), TypeError, "x64 is off, got int64"),
    "kv_end-int64": ("kv_end", lambda w: wide(w.lengths), TypeError, "x64 is off, got int64"),
}

DECODE = {
    **{
        name: Wrong(lambda w, a=argument, v=value: w.decode(**{a: v}), error, (argument, says))
        for name, (argument, value, error, says) in VALUES.items()
    },
    **{
        name: Wrong(lambda w, a=argument, v=value: w.decode(**{a: v(w)}), error, (argument, says))
        for name, (argument, value, error, says) in ARRAYS.items()
    },
    # --- rows ---
    "rows-mismatch": Wrong(lambda w: w.decode(query_len=2), ValueError, ("query_len", "4 * 2", "got 4")),
    "rows-ragged-bound": Wrong(
        lambda w: w.decode(query_len=-1, cu_query_lens=i32(0, 1, 2, 3, 4)), ValueError, ("query_len", "-1")
    ),
    # --- heads and dims ---
    "heads-not-multiple": Wrong(lambda w: w.decode(query=w.query[:, :3]), ValueError, ("heads=3", "kv_heads=2")),
    "heads-none": Wrong(lambda w: w.decode(query=w.query[:, :0]), ValueError, ("heads", "at least 1", "got 0")),
    "k_dim-not-multiple-of-16": Wrong(
        lambda w: w.decode(query=w.query[..., :24], cache=(w.cache.bases[0][..., :24], w.cache.bases[1])),
        ValueError, ("k_dim", "multiple of 16", "24"),
    ),
    "k_dim-mismatch": Wrong(lambda w: w.decode(query=w.query[..., :16]), ValueError, ("key_cache", "16", "32")),
    "v_dim-too-large": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], jnp.zeros((14, 16, 2, 272)))), ValueError, ("v_dim", "256", "272")
    ),
    # --- cache ---
    "cache-dtype": Wrong(
        lambda w: w.decode(cache=w.quantised("float16")), TypeError, ("key_cache", "float32", "float16")
    ),
    "cache-uint8": Wrong(
        lambda w: w.decode(cache=w.quantised("uint8"), k_scale=1.0, v_scale=1.0),
        TypeError, ("key_cache", "uint8", "view a uint8 cache as float8_e4m3fn"),
    ),
    "cache-fused-dtype": Wrong(
        lambda w: w.decode(cache=PagedCache(jnp.zeros((3, 2, 16, 64), jnp.int16), "pages kv_heads block (kv dim)")),
        TypeError, ("cache must have dtype", "int16"),
    ),
    "cache-two-dtypes": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], w.quantised("float16")[1])), TypeError, ("float32", "float16")
    ),
    "cache-pages-differ": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], w.cache.bases[1][:5])), ValueError, ("value", "14", "5")
    ),
    "cache-3d": Wrong(
        lambda w: w.decode(cache=tuple(base[0] for base in w.cache.bases)), ValueError, ("base 0", "(16, 2, 32)")
    ),
    "k_scale-missing": Wrong(
        lambda w: w.decode(cache=w.quantised(), v_scale=1.0), ValueError, ("k_scale", "int8", "None")
    ),
    "v_scale-missing": Wrong(
        lambda w: w.decode(cache=w.quantised("float8_e4m3fn"), k_scale=1.0),
        ValueError, ("v_scale", "float8_e4m3fn", "None"),
    ),
    # --- plan and backend ---
    "plan-window": Wrong(lambda w: w.decode(plan=w.plan(window=17)), ValueError, ("plan", "window=17", "16")),
    "plan-query_len": Wrong(
        lambda w: w.decode(plan=w.plan(query_len=2, max_requests=8)), ValueError, ("plan", "query_len=2", "1")
    ),
    "plan-ragged": Wrong(lambda w: w.decode(plan=w.plan(ragged=True)), ValueError, ("plan", "ragged=True", "False")),
    "plan-requests": Wrong(
        lambda w: w.decode(plan=w.plan(max_requests=3)), ValueError, ("plan", "max_requests", "up to 3", "got 4")
    ),
    "plan-table": Wrong(
        lambda w: w.decode(plan=w.plan(block_table=w.table[:, :2])), ValueError, ("plan", "max_blocks", "2", "3")
    ),
    "plan-heads": Wrong(
        lambda w: w.decode(plan=w.plan(query=w.query[:, :2])), ValueError, ("plan", "heads=2", "got 4")
    ),
    "plan-dtype": Wrong(
        lambda w: w.decode(plan=w.plan(query=w.query.astype(jnp.float16), cache=w.quantised())),
        ValueError, ("plan", "dtype='float16'"),
    ),
    "plan-hopper": Wrong(
        lambda w: w.decode(plan=replace(w.plan(), kernel="hopper")), ValueError, ("plan.kernel", "hopper")
    ),
    "plan-kernel-on-cpu": Wrong(
        lambda w: w.decode(plan=w.plan(backend=None, device=DeviceProfile.named("h200"))),
        ValueError, ("'pallas_triton'", "lowers for cuda", "platform cpu"),
    ),
    "plan-against-backend": Wrong(
        lambda w: w.decode(plan=w.plan(), backend="interpret"), ValueError, ("backend 'interpret'", "plan.kernel='ops'")
    ),
    "plan-not-invariant": Wrong(
        lambda w: w.decode(plan=w.plan(), batch_invariant=True), ValueError, ("batch_invariant", "plan")
    ),
    # --- data, on request ---
    "validate-page": Wrong(
        lambda w: w.decode(block_table=w.table.at[:, 1].set(99), validate=True),
        ValueError, ("block_table", "request 0", "[0, 14)", "got 99"),
    ),
    "validate-table": Wrong(
        lambda w: w.decode(seq_lens=i32(20, 5, 49, 33), validate=True), ValueError, ("request 2", "48", "3 blocks")
    ),
    "validate-rows": Wrong(
        lambda w: w.decode(cu_query_lens=i32(0, 1, 3, 4, 4), validate=True), ValueError, ("query_len", "request 1", "2")
    ),
    "validate-tokens": Wrong(
        lambda w: w.decode(cu_query_lens=i32(0, 1, 2, 3, 5), query_len=2, validate=True),
        ValueError, ("cu_query_lens", "4 tokens", "got 5"),
    ),
    # --- traced where a value is needed ---
    **{
        f"traced-{name}": Wrong(
            lambda w, n=name, v=value: traced(lambda x: w.decode(**{n: x}), v),
            TypeError, (name, "must be static", f"static_argnames='{name}'", "traced"),
        )
        for name, value in {
            "window": 16, "query_len": 1, "return_lse": True, "batch_invariant": True, "validate": True
        }.items()
    },
    "traced-validate-data": Wrong(
        lambda w: traced(lambda lengths: w.decode(seq_lens=lengths, validate=True), w.lengths),
        ValueError, ("validate must be False", "check_inputs", "got validate=True"),
    ),
    "traced-table-shape": Wrong(
        lambda w: traced(lambda table: w.decode(block_table=table), w.table[0]), ValueError, ("block_table", "[3]")
    ),
}  # fmt: skip

OTHERS = {
    # --- swa_decode_gated ---
    "gated-splits-zero": Wrong(lambda w: w.gated(splits=0), ValueError, ("splits", "at least 1", "got 0")),
    "gated-splits-bool": Wrong(lambda w: w.gated(splits=True), TypeError, ("splits", "True")),
    "gated-splits-grid": Wrong(lambda w: w.gated(splits=65536), ValueError, ("splits", "65536")),
    "gated-splits-traced": Wrong(
        lambda w: traced(lambda splits: w.gated(splits=splits), 2), TypeError, ("splits", "must be static")
    ),
    "gated-pack-zero": Wrong(lambda w: w.gated(pack=0), ValueError, ("pack", "at least 1", "got 0")),
    "gated-pack-float": Wrong(lambda w: w.gated(pack=1.0), TypeError, ("pack", "1.0")),
    "gated-pack-traced": Wrong(
        lambda w: traced(lambda pack: w.gated(pack=pack), 1), TypeError, ("pack", "must be static")
    ),
    "gated-pack-divides": Wrong(lambda w: w.gated(pack=2), ValueError, ("query_len=1", "pack=2")),
    "gated-pack-rows": Wrong(
        lambda w: w.gated(
            query=jnp.tile(w.query, (40, 1, 1)), gate=jnp.tile(w.gate, (40, 1)), query_len=40, pack=40
        ),
        ValueError, ("pack", "64", "pack=40", "group=2"),
    ),
    "gated-gate-none": Wrong(lambda w: w.gated(gate=None), TypeError, ("gate", "NoneType")),
    "gated-gate-shape": Wrong(lambda w: w.gated(gate=w.gate[:2]), ValueError, ("gate", "[4, 4]", "[2, 4]")),
    "gated-scale-nan": Wrong(lambda w: w.gated(scale=float("nan")), ValueError, ("scale", "nan")),
    "gated-window": Wrong(lambda w: w.gated(window=0), ValueError, ("window", "at least 1", "got 0")),
    "gated-query_len": Wrong(lambda w: w.gated(query_len=0), ValueError, ("query_len", "at least 1", "got 0")),
    "gated-table-int64": Wrong(
        lambda w: w.gated(block_table=wide(w.table)), TypeError, ("block_table", "int32", "got int64")
    ),
    "gated-key-cache": Wrong(lambda w: w.gated(key_cache=w.cache.bases[0][0]), ValueError, ("(16, 2, 32)",)),
    "gated-key-cache-kind": Wrong(lambda w: w.gated(key_cache=None), TypeError, ("base", "NoneType")),
    # --- append ---
    "append-cache-kind": Wrong(lambda w: w.append(cache=w.key), TypeError, ("cache", "ArrayImpl")),
    "append-cache-without-data": Wrong(
        lambda w: w.append(cache=specs(w.cache)), TypeError, ("cache must hold data",)
    ),
    "append-cache-uint8": Wrong(
        lambda w: w.append(cache=w.quantised("uint8"), k_scale=1.0, v_scale=1.0), TypeError, ("cache", "uint8")
    ),
    "append-key-kind": Wrong(lambda w: w.append(key=w.key.tolist()), TypeError, ("key", "list")),
    "append-key-dtype": Wrong(
        lambda w: w.append(key=w.key.astype(jnp.float16)), TypeError, ("key", "float32", "got float16")
    ),
    "append-value-dtype": Wrong(
        lambda w: w.append(value=w.value.astype(jnp.bfloat16)), TypeError, ("value", "float32", "got bfloat16")
    ),
    "append-key-quantised": Wrong(
        lambda w: w.append(cache=w.quantised(), key=w.key.astype(jnp.int8), k_scale=1.0, v_scale=1.0),
        TypeError, ("key", "bfloat16, float16, float32", "got int8"),
    ),
    "append-key-heads": Wrong(
        lambda w: w.append(key=w.key[:, :1]), ValueError, ("key", "[4, 2, 32]", "got [4, 1, 32]")
    ),
    "append-key-2d": Wrong(lambda w: w.append(key=w.key[0]), ValueError, ("key", "3 dims", "[2, 32]")),
    "append-value-dim": Wrong(
        lambda w: w.append(value=w.value[..., :16]), ValueError, ("value", "[4, 2, 32]", "got [4, 2, 16]")
    ),
    "append-value-rows": Wrong(
        lambda w: w.append(value=w.value[:3]), ValueError, ("value", "[4, 2, 32]", "got [3, 2, 32]")
    ),
    "append-slots-kind": Wrong(lambda w: w.append(slot_mapping=[0, 1]), TypeError, ("slot_mapping", "list")),
    "append-slots-dtype": Wrong(
        lambda w: w.append(slot_mapping=w.slots.astype(jnp.float32)), TypeError, ("slot_mapping", "float32")
    ),
    "append-slots-int64": Wrong(
        lambda w: w.append(slot_mapping=wide(w.slots)), TypeError, ("slot_mapping", "x64 is off", "got int64")
    ),
    "append-slots-2d": Wrong(lambda w: w.append(slot_mapping=w.slots[None]), ValueError, ("slot_mapping", "[1, 4]")),
    "append-slots-long": Wrong(
        lambda w: w.append(slot_mapping=jnp.arange(5)), ValueError, ("slot_mapping", "at most 4", "[5]")
    ),
    "append-scale-missing": Wrong(
        lambda w: w.append(cache=w.quantised(), k_scale=1.0), ValueError, ("v_scale", "int8", "None")
    ),
    "append-scale-zero": Wrong(lambda w: w.append(k_scale=0.0), ValueError, ("k_scale", "positive", "0.0")),
    "append-scale-negative": Wrong(lambda w: w.append(v_scale=-2), ValueError, ("v_scale", "positive", "-2")),
    "append-scale-nan": Wrong(lambda w: w.append(v_scale=float("nan")), ValueError, ("v_scale", "finite", "nan")),
    "append-scale-shape": Wrong(lambda w: w.append(k_scale=jnp.ones(4)), ValueError, ("k_scale", "[2]", "[4]")),
    "append-layer": Wrong(lambda w: w.append(layer=1), ValueError, ("layer", "left out", "1")),
    "append-backend": Wrong(lambda w: w.append(backend="triton"), ValueError, ("backend", "'triton'")),
    "append-backend-on-cpu": Wrong(
        lambda w: w.append(backend="pallas_triton"), ValueError, ("'pallas_triton' of append", "platform cpu")
    ),
    # --- merge_states ---
    "merge-kind": Wrong(lambda w: w.merge(outs=[w.outs]), TypeError, ("outs", "list")),
    "merge-dtype": Wrong(lambda w: w.merge(outs=w.outs.astype(jnp.int32)), TypeError, ("outs", "int32")),
    "merge-wide": Wrong(lambda w: w.merge(outs=np.zeros((2, 4, 4, 32))), TypeError, ("outs", "float64")),
    "merge-3d": Wrong(lambda w: w.merge(outs=w.outs[0]), ValueError, ("outs", "parts >= 1", "[4, 4, 32]")),
    "merge-no-parts": Wrong(lambda w: w.merge(outs=w.outs[:0], lses=w.lses[:0]), ValueError, ("outs", "[0, 4, 4, 32]")),
    "merge-v_dim": Wrong(lambda w: w.merge(outs=w.outs[..., :8]), ValueError, ("v_dim", "at least 16", "got 8")),
    "merge-without-data": Wrong(lambda w: w.merge(outs=specs(w.outs)), TypeError, ("outs must hold data",)),
    "merge-lses-kind": Wrong(lambda w: w.merge(lses=None), TypeError, ("lses", "NoneType")),
    "merge-lses-shape": Wrong(lambda w: w.merge(lses=w.lses[:1]), ValueError, ("lses", "[2, 4, 4]", "got [1, 4, 4]")),
    "merge-lses-dtype": Wrong(lambda w: w.merge(lses=w.lses.astype(jnp.float16)), TypeError, ("lses", "float16")),
    "merge-sinks": Wrong(lambda w: w.merge(sinks=w.sinks[:3]), ValueError, ("sinks", "[4]", "[3]")),
    "merge-sinks-kind": Wrong(lambda w: w.merge(sinks=1.0), TypeError, ("sinks", "float")),
    "merge-gate": Wrong(lambda w: w.merge(gate=w.gate[:3]), ValueError, ("gate", "[4, 4]", "[3, 4]")),
    "merge-gate-dtype": Wrong(lambda w: w.merge(gate=w.gate.astype(jnp.int8)), TypeError, ("gate", "int8")),
    "merge-out_dtype": Wrong(lambda w: w.merge(out_dtype=jnp.int8), TypeError, ("out_dtype", "int8")),
    "merge-backend": Wrong(lambda w: w.merge(backend="ops"), ValueError, ("backend", "'ops'")),
    "merge-backend-on-cpu": Wrong(
        lambda w: w.merge(backend="pallas_triton"), ValueError, ("'pallas_triton' of merge_states", "platform cpu")
    ),
    # --- plan_for, warmup ---
    "plan_for-window": Wrong(lambda w: w.plan(window=0), ValueError, ("window", "at least 1", "got 0")),
    "plan_for-window-float": Wrong(lambda w: w.plan(window=8.0), TypeError, ("window", "8.0")),
    "plan_for-max_requests": Wrong(lambda w: w.plan(max_requests=-1), ValueError, ("max_requests", "-1")),
    "plan_for-max_requests-kind": Wrong(lambda w: w.plan(max_requests="4"), TypeError, ("max_requests", "'4'")),
    "plan_for-query_len": Wrong(lambda w: w.plan(query_len=0), ValueError, ("query_len", "got 0")),
    "plan_for-query": Wrong(lambda w: w.plan(query=w.query[0]), ValueError, ("query", "3 dims", "[4, 32]")),
    "plan_for-query-kind": Wrong(lambda w: w.plan(query=(4, 4, 32)), TypeError, ("query", "tuple")),
    "plan_for-table": Wrong(lambda w: w.plan(block_table=w.table[0]), ValueError, ("block_table", "[3]")),
    "plan_for-table-kind": Wrong(lambda w: w.plan(block_table=w.table.tolist()), TypeError, ("block_table", "list")),
    "plan_for-table-int64": Wrong(
        lambda w: w.plan(block_table=wide(w.table)), TypeError, ("block_table", "x64 is off", "got int64")
    ),
    "plan_for-backend": Wrong(lambda w: w.plan(backend="fast"), ValueError, ("backend", "'fast'")),
    "plan_for-backend-of-a-device": Wrong(
        lambda w: w.plan(backend="fast", device=DeviceProfile.named("h200")), ValueError, ("backend", "'fast'")
    ),
    "plan_for-kernel-without-gpu": Wrong(
        lambda w: w.plan(backend="pallas_triton", device=DeviceProfile.named("cpu")), ValueError, ("portable", "'cpu'")
    ),
    "plan_for-cache": Wrong(lambda w: w.plan(cache=w.query), TypeError, ("cache", "ArrayImpl")),
    "plan_for-cache-dtype": Wrong(
        lambda w: w.plan(cache=w.quantised("float16")), TypeError, ("key_cache", "float32", "float16")
    ),
    "plan_for-reach": Wrong(
        lambda w: w.plan(block_table=jax.ShapeDtypeStruct((4, 1 << 27), jnp.int32)),
        ValueError, ("block * max_blocks", "134217728"),
    ),
    "warmup-plan": Wrong(lambda w: warmup("plan", w.query, w.cache), TypeError, ("plan", "str")),
    "warmup-requests": Wrong(
        lambda w: warmup(w.plan(), w.query, w.cache, requests=[5]), ValueError, ("requests", "at most 4", "got 5")
    ),
    "warmup-requests-kind": Wrong(
        lambda w: warmup(w.plan(), w.query, w.cache, requests=[1.5]), TypeError, ("requests", "1.5")
    ),
    "warmup-cache": Wrong(lambda w: warmup(w.plan(), w.query, w.query), TypeError, ("cache", "ArrayImpl")),
    "warmup-dtype": Wrong(
        lambda w: warmup(w.plan(), w.query.astype(jnp.float16), w.cache), TypeError, ("key_cache", "float16", "float32")
    ),
    "warmup-sinks": Wrong(
        lambda w: warmup(w.plan(), w.query, w.cache, sinks=w.sinks[:2]), ValueError, ("sinks", "[4]", "[2]")
    ),
    # --- check_inputs ---
    "check-window": Wrong(lambda w: w.check(window=True), TypeError, ("window", "True")),
    "check-query_len": Wrong(lambda w: w.check(query_len=0), ValueError, ("query_len", "at least 1", "got 0")),
    "check-cache": Wrong(lambda w: w.check(cache=None), TypeError, ("cache", "NoneType")),
    "check-page": Wrong(lambda w: w.check(block_table=w.table - 100), ValueError, ("block_table", "request 0", "14")),
    "check-reach": Wrong(lambda w: w.check(seq_lens=w.lengths + 20), ValueError, ("request 3", "52", "3 blocks of 16")),
    "check-table-kind": Wrong(lambda w: w.check(block_table=[[0]]), TypeError, ("block_table", "list")),
    "check-table-shape": Wrong(lambda w: w.check(block_table=w.table[:2]), ValueError, ("seq_lens", "[2]", "[4]")),
    "check-table-int64": Wrong(
        lambda w: w.check(block_table=wide(w.table)), TypeError, ("block_table", "x64 is off", "got int64")
    ),
    "check-seq_lens-none": Wrong(lambda w: w.check(seq_lens=None), TypeError, ("seq_lens", "NoneType")),
    "check-kv_start": Wrong(lambda w: w.check(kv_start=i32(0)), ValueError, ("kv_start", "[4]", "[1]")),
    "check-kv_end": Wrong(lambda w: w.check(kv_end=jnp.zeros(4)), TypeError, ("kv_end", "float32")),
    "check-edges-start": Wrong(
        lambda w: w.check(cu_query_lens=i32(1, 2, 3, 4, 5)), ValueError, ("cu_query_lens", "start at 0", "got 1")
    ),
    "check-edges-decrease": Wrong(
        lambda w: w.check(cu_query_lens=i32(0, 1, 0, 1, 2)), ValueError, ("cu_query_lens", "request 1", "-1 rows")
    ),
    "check-edges-bound": Wrong(
        lambda w: w.check(cu_query_lens=i32(0, 1, 2, 5, 6), query_len=2), ValueError, ("query_len=2", "request 2", "3")
    ),
    "check-edges-tokens": Wrong(
        lambda w: w.check(cu_query_lens=i32(0, 1, 2, 3, 4), tokens=3), ValueError, ("cu_query_lens", "3 tokens", "4")
    ),
    "check-traced": Wrong(
        lambda w: traced(lambda lengths: w.check(seq_lens=lengths), w.lengths),
        TypeError, ("seq_lens", "concrete", "traced"),
    ),
    # --- PagedCache, cache_specs ---
    "cache-layout-kind": Wrong(lambda w: PagedCache(w.cache.bases, 3), TypeError, ("layout", "3")),
    "cache-layout-axis": Wrong(
        lambda w: PagedCache(w.cache.bases, "pages block heads dim"), ValueError, ("layout", "pages block heads dim")
    ),
    "cache-base-kind": Wrong(lambda w: PagedCache([1, 2], PAIR), TypeError, ("base", "int")),
    "cache-base-count": Wrong(lambda w: PagedCache(w.cache.bases[0], PAIR), ValueError, (PAIR, "2 array(s)", "got 1")),
    "cache-base-three": Wrong(
        lambda w: PagedCache((*w.cache.bases, w.key), PAIR), ValueError, (PAIR, "2 array(s)", "got 3")
    ),
    "cache-base-dtypes": Wrong(
        lambda w: PagedCache((w.cache.bases[0], w.quantised()[1]), PAIR), TypeError, ("one dtype", "float32", "int8")
    ),
    "cache-kv-axis": Wrong(
        lambda w: PagedCache(jnp.zeros((3, 4, 16, 2, 64)), "kv pages block kv_heads dim"),
        ValueError, ("kv", "size 2", "(3, 4"),
    ),
    "cache-packed-dims": Wrong(
        lambda w: PagedCache(jnp.zeros((4, 2, 16, 128)), "pages kv_heads block (kv dim)", k_dim=96, v_dim=64),
        ValueError, ("k_dim=96", "v_dim=64", "128"),
    ),
    "cache-packed-kind": Wrong(
        lambda w: PagedCache(jnp.zeros((4, 2, 16, 128)), "pages kv_heads block (kv dim)", k_dim=96.0),
        TypeError, ("k_dim", "96.0"),
    ),
    "cache-empty-layers": Wrong(
        lambda w: PagedCache.empty(PAIR, pages=1, block=1, kv_heads=1, k_dim=16, layers=2),
        ValueError, ("layers", "left out", "2"),
    ),
    "cache-empty-layers-missing": Wrong(
        lambda w: PagedCache.empty(f"layers {PAIR}", pages=1, block=1, kv_heads=1, k_dim=16),
        ValueError, ("layers", "given", "None"),
    ),
    "cache-empty-k_dim": Wrong(
        lambda w: PagedCache.empty(PAIR, pages=1, block=1, kv_heads=1, k_dim=20), ValueError, ("k_dim", "16", "20")
    ),
    "cache_specs-one-dim": Wrong(
        lambda w: cache_specs("pages kv_heads block (kv dim)", k_dim=32), ValueError, ("k_dim=32", "v_dim=None")
    ),
    "cache_specs-layout": Wrong(lambda w: cache_specs("pages heads"), ValueError, ("layout", "pages heads")),
}  # fmt: skip

LAYERED = {
    "layer-missing": Wrong(lambda w: w.decode(), ValueError, ("layer", "must be given", "None")),
    "layer-beyond": Wrong(lambda w: w.decode(layer=LAYERS), ValueError, ("layer", "at most 2", "got 3")),
    "layer-negative": Wrong(lambda w: w.decode(layer=-1), ValueError, ("layer", "at least 0", "got -1")),
    "layer-bool": Wrong(lambda w: w.decode(layer=True), TypeError, ("layer", "True")),
    "layer-float": Wrong(lambda w: w.decode(layer=jnp.float32(1)), TypeError, ("layer", "int32", "got float32")),
    "layer-shape": Wrong(lambda w: w.decode(layer=i32(1)), ValueError, ("layer", "shape []", "got [1]")),
    "layer-int64": Wrong(lambda w: w.decode(layer=np.array(1)), TypeError, ("layer", "x64 is off", "got int64")),
    "layer-append-missing": Wrong(lambda w: w.append(), ValueError, ("layer", "must be given", "None")),
    "layer-append-beyond": Wrong(lambda w: w.append(layer=LAYERS), ValueError, ("layer", "at most 2", "got 3")),
    "layer-append-int64": Wrong(lambda w: w.append(layer=np.array(1)), TypeError, ("layer", "x64 is off", "int64")),
    "layer-warmup-beyond": Wrong(
        lambda w: warmup(w.plan(), w.query, w.cache, layer=LAYERS), ValueError, ("layer", "at most 2", "got 3")
    ),
}

TABLE = {**DECODE, **OTHERS, **LAYERED}


def refuse(name: str) -> str:
    """Make one wrong call; return what is wrong with the way it was refused, or an empty text."""
    wrong = TABLE[name]
    world = World(f"layers {PAIR}" if name in LAYERED else PAIR)
    before = [np.array(base) for base in world.cache.bases]
    try:
        wrong.call(world)
    except Exception as error:
        if type(error) is not wrong.error:
            return f"{name}: {type(error).__name__} instead of {wrong.error.__name__}: {error}"
        missing = [words for words in wrong.says if words not in str(error)]
        if missing:
            return f"{name}: the message lacks {missing}: {error}"
    else:
        return f"{name}: nothing was raised"
    if any(base.is_deleted() for base in world.cache.bases) or not same_bits(list(world.cache.bases), before):
        return f"{name}: the cache was written"
    return ""


@pytest.mark.parametrize("name", TABLE)
def test_wrong_arguments_are_refused(name):
    assert refuse(name) == ""


def test_the_valid_arguments_are_valid():
    world = World()
    assert world.decode().shape == (4, 4, 32)
    assert world.gated().shape == (4, 4, 32)
    assert isinstance(world.append(), PagedCache)
    assert len(world.merge()) == 2
    assert world.check() is None
    assert warmup(world.plan(), world.query, world.cache) is None
    layered = World(f"layers {PAIR}")
    assert layered.decode(layer=LAYERS - 1).shape == (4, 4, 32)
    assert isinstance(layered.append(layer=LAYERS - 1), PagedCache)


def test_numbers_and_indices_of_numpy_are_valid():
    world = World()
    arrays = {"block_table": np.asarray(world.table), "seq_lens": np.asarray(world.lengths)}
    numbers = {"window": np.int64(16), "query_len": np.int32(1), "scale": np.float32(0.125), "softcap": np.float64(9.0)}
    expected = world.decode(scale=0.125, softcap=9.0)
    assert same_bits(world.decode(**arrays, **numbers), expected)


def test_int64_indices_are_valid_under_x64():
    world = World()
    expected, written = world.decode(kv_start=i32(0, 1, 2, 3)), world.append()
    with jax.enable_x64(True):
        out = world.decode(
            block_table=wide(world.table), seq_lens=wide(world.lengths), kv_start=wide(i32(0, 1, 2, 3))
        )  # fmt: skip
        assert same_bits(out, expected)
        assert same_bits(world.append(slot_mapping=wide(world.slots)), written)


def test_errors_are_the_same_without_asserts():
    program = "import sys; from tests.jax import test_errors; sys.exit(test_errors.main())"
    result = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", program],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(TABLE)} refused" in result.stdout


def main() -> int:
    """Make every wrong call, in a process without asserts; return the exit status."""
    if __debug__:
        raise RuntimeError("run this with python -O")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        complaints = [complaint for complaint in map(refuse, TABLE) if complaint]
    print("\n".join(complaints) or f"{len(TABLE)} refused")
    return bool(complaints)
