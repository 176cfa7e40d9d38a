"""Wrong arguments: the right exception, a message that names argument and value, and nothing written.

One table of wrong calls. Each gets a fresh world of valid arguments and changes what is wrong. A child process started
with ``python -O`` repeats the table, because no check may hang on an ``assert``.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from swa_torch import (
    PagedCache,
    append,
    check_inputs,
    merge_states,
    plan_for,
    swa_decode,
    swa_decode_gated,
    warmup,
)  # fmt: skip
from tests.torch.helpers import make_step, normal, same_bits

UNTOUCHED = 7.0


class World:
    """Valid arguments of every entry point; ``out`` is pre-filled, so that a write shows."""

    def __init__(self, layout: str = "pages block kv_heads dim", layers: int | None = None) -> None:
        self.step = make_step(layout=layout, layers=layers)
        self.query, self.cache, self.table, self.lengths = self.step
        self.out = torch.full((4, 8, 64), UNTOUCHED)
        self.gate = normal(4, 8)
        self.sinks = normal(8)
        self.key, self.value = normal(4, 2, 64, seed=1), normal(4, 2, 64, seed=2)
        self.slots = torch.tensor([0, 17, 30, 5])
        self.outs, self.lses = normal(2, 4, 8, 64), normal(2, 4, 8)

    def decode(self, **changed: Any) -> Any:
        """Call ``swa_decode`` with some arguments changed."""
        arguments = {
            "query": self.query, "cache": self.cache, "block_table": self.table, "seq_lens": self.lengths,
            "window": 16, "out": self.out, **changed,
        }  # fmt: skip
        return swa_decode(**arguments)

    def decode_new(self, **changed: Any) -> Any:
        """Call ``swa_decode`` without ``out``."""
        return self.decode(**{"out": None, **changed})

    def gated(self, **changed: Any) -> None:
        """Call ``swa_decode_gated`` with some arguments changed."""
        arguments = {
            "query": self.query, "key_cache": self.cache.bases[0], "value_cache": self.cache.bases[1],
            "block_table": self.table, "seq_lens": self.lengths, "gate": self.gate, "output": self.out, "scale": 0.125,
            "window": 16, "query_len": 1, "splits": 2, **changed,
        }  # fmt: skip
        swa_decode_gated(**arguments)

    def append(self, **changed: Any) -> None:
        """Call ``append`` with some arguments changed."""
        arguments = {
            "cache": self.cache, "key": self.key, "value": self.value, "slot_mapping": self.slots, **changed
        }  # fmt: skip
        append(**arguments)

    def merge(self, **changed: Any) -> Any:
        """Call ``merge_states`` with some arguments changed."""
        return merge_states(**{"outs": self.outs, "lses": self.lses, **changed})

    def plan(self, **changed: Any) -> Any:
        """Call ``plan_for`` with some arguments changed."""
        arguments = {"query": self.query, "cache": self.cache, "block_table": self.table, "window": 16, **changed}
        return plan_for(**arguments)

    def check(self, **changed: Any) -> None:
        """Call ``check_inputs`` with some arguments changed."""
        arguments = {
            "cache": self.cache, "block_table": self.table, "seq_lens": self.lengths, "window": 16, **changed
        }  # fmt: skip
        check_inputs(**arguments)

    def quantised(self, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a cache of another dtype, as a tuple."""
        return tuple(torch.zeros(14, 16, 2, 64, dtype=dtype) for _ in range(2))


class Wrong(NamedTuple):
    """A call that must raise ``error`` with a message that contains every one of ``says``."""

    call: Callable[[World], Any]
    error: type[Exception]
    says: tuple[str, ...]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with a last stride of 2."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def aligned_bytes(size: int, offset: int = 0) -> torch.Tensor:
    """Return ``size`` bytes at an address that is ``offset`` more than a multiple of 256."""
    whole = torch.zeros(size + 512, dtype=torch.uint8)
    start = -whole.data_ptr() % 256 + offset
    return whole[start : start + size]


def split_plan(world: World) -> Any:
    """Return a plan that needs a workspace."""
    return replace(world.plan(), splits=4)


def out_over(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Return an output of the right shape in the memory of ``tensor``."""
    return tensor.view(-1)[: world.out.numel()].view(world.out.shape)


def query_slice(world: World) -> dict[str, torch.Tensor]:
    """Return a query and an output that are column slices of one buffer and share a column."""
    fused = torch.full((4, 16 * 64), UNTOUCHED)
    return {"query": fused[:, : 8 * 64].view(4, 8, 64), "out": fused[:, 7 * 64 : 15 * 64].view(4, 8, 64)}


NUMBERS = {
    "scale-nan": ("scale", float("nan"), ValueError, "nan"),
    "scale-inf": ("scale", float("inf"), ValueError, "inf"),
    "scale-bool": ("scale", True, TypeError, "True"),
    "scale-string": ("scale", "1", TypeError, "'1'"),
    "scale-tensor": ("scale", torch.tensor(1.0), TypeError, "Tensor"),
    "softcap-nan": ("softcap", float("nan"), ValueError, "nan"),
    "softcap-inf": ("softcap", float("inf"), ValueError, "inf"),
    "softcap-zero": ("softcap", 0.0, ValueError, "0.0"),
    "softcap-negative": ("softcap", -1.0, ValueError, "-1.0"),
    "softcap-bool": ("softcap", False, TypeError, "False"),
    "window-zero": ("window", 0, ValueError, "got 0"),
    "window-negative": ("window", -1, ValueError, "got -1"),
    "window-bool": ("window", True, TypeError, "True"),
    "window-float": ("window", 16.0, TypeError, "16.0"),
    "query_len-zero": ("query_len", 0, ValueError, "got 0"),
    "query_len-bool": ("query_len", True, TypeError, "True"),
    "query_len-float": ("query_len", 1.0, TypeError, "1.0"),
    "k_scale-nan": ("k_scale", float("nan"), ValueError, "nan"),
    "v_scale-inf": ("v_scale", float("inf"), ValueError, "inf"),
    "k_scale-bool": ("k_scale", True, TypeError, "True"),
    "k_scale-shape": ("k_scale", torch.ones(3), ValueError, "[3]"),
    "v_scale-2d": ("v_scale", torch.ones(2, 1), ValueError, "[2, 1]"),
    "k_scale-dtype": ("k_scale", torch.ones(2, dtype=torch.float16), TypeError, "float16"),
    "out_dtype-fp8": ("out_dtype", torch.float8_e5m2, TypeError, "float8_e5m2"),
    "out_dtype-string": ("out_dtype", "float32", TypeError, "float32"),
    "backend-unknown": ("backend", "cuda", ValueError, "'cuda'"),
    "backend-triton-on-cpu": ("backend", "triton", ValueError, "cpu"),
    "plan-kind": ("plan", "fast", TypeError, "str"),
}

TENSORS = {
    # name: (argument, value made from the world, error, further words of the message)
    "query-kind": ("query", lambda w: w.query.numpy(), TypeError, "ndarray"),
    "query-dtype": ("query", lambda w: w.query.double(), TypeError, "float64"),
    "query-2d": ("query", lambda w: w.query[0], ValueError, "[8, 64]"),
    "query-strides": ("query", lambda w: strided(w.query), ValueError, "128, 2]"),
    "query-tokens": ("query", lambda w: w.query[:3], ValueError, "got 3"),
    "table-kind": ("block_table", lambda w: w.table.tolist(), TypeError, "list"),
    "table-dtype": ("block_table", lambda w: w.table.float(), TypeError, "float32"),
    "table-int16": ("block_table", lambda w: w.table.short(), TypeError, "int16"),
    "table-1d": ("block_table", lambda w: w.table[0], ValueError, "[3]"),
    "table-strides": ("block_table", lambda w: strided(w.table), ValueError, "[6, 2]"),
    "table-device": ("block_table", lambda w: w.table.to("meta"), ValueError, "meta"),
    "seq_lens-dtype": ("seq_lens", lambda w: w.lengths.float(), TypeError, "float32"),
    "seq_lens-shape": ("seq_lens", lambda w: w.lengths[:3], ValueError, "[3]"),
    "seq_lens-2d": ("seq_lens", lambda w: w.lengths[:, None], ValueError, "[4, 1]"),
    "seq_lens-strides": ("seq_lens", lambda w: strided(w.lengths), ValueError, "[2]"),
    "seq_lens-device": ("seq_lens", lambda w: w.lengths.to("meta"), ValueError, "meta"),
    "cu_query_lens-shape": ("cu_query_lens", lambda w: i32(0, 1, 2, 3), ValueError, "[4]"),
    "cu_query_lens-dtype": ("cu_query_lens", lambda w: torch.zeros(5), TypeError, "float32"),
    "cu_query_lens-list": ("cu_query_lens", lambda w: [0, 1, 2, 3, 4], TypeError, "list"),
    "kv_start-shape": ("kv_start", lambda w: i32(0, 0, 0), ValueError, "[3]"),
    "kv_start-number": ("kv_start", lambda w: 3, TypeError, "int"),
    "kv_end-dtype": ("kv_end", lambda w: torch.zeros(4), TypeError, "float32"),
    "gate-shape": ("gate", lambda w: w.gate[:, :4], ValueError, "[4, 4]"),
    "gate-transposed": ("gate", lambda w: w.gate.t(), ValueError, "[8, 4]"),
    "gate-3d": ("gate", lambda w: w.gate[..., None], ValueError, "[4, 8, 1]"),
    "gate-dtype": ("gate", lambda w: w.gate.double(), TypeError, "float64"),
    "gate-device": ("gate", lambda w: w.gate.to("meta"), ValueError, "meta"),
    "sinks-shape": ("sinks", lambda w: w.sinks[:2], ValueError, "[2]"),
    "sinks-2d": ("sinks", lambda w: w.sinks[None], ValueError, "[1, 8]"),
    "sinks-dtype": ("sinks", lambda w: w.sinks.long(), TypeError, "int64"),
    "out-kind": ("out", lambda w: w.out.numpy(), TypeError, "ndarray"),
    "out-shape": ("out", lambda w: w.out.view(4, 64, 8), ValueError, "[4, 64, 8]"),
    "out-flat": ("out", lambda w: w.out.view(4, 512), ValueError, "[4, 512]"),
    "out-strides": ("out", lambda w: strided(w.out), ValueError, "128, 2]"),
    "out-device": ("out", lambda w: w.out.to("meta"), ValueError, "meta"),
    "out-integers": ("out", lambda w: w.out.int(), TypeError, "int32"),
    "cache-kind": ("cache", lambda w: w.cache.bases[0], TypeError, "Tensor"),
    "cache-three": ("cache", lambda w: (*w.cache.bases, w.query), TypeError, "tuple"),
    "cache-none": ("cache", lambda w: None, TypeError, "NoneType"),
}

DECODE = {
    **{
        name: Wrong(lambda w, a=argument, v=value: w.decode(**{a: v}), error, (argument, says))
        for name, (argument, value, error, says) in NUMBERS.items()
    },
    **{
        name: Wrong(lambda w, a=argument, v=value: w.decode(**{a: v(w)}), error, (argument, says))
        for name, (argument, value, error, says) in TENSORS.items()
    },
    # --- rows ---
    "rows-mismatch": Wrong(lambda w: w.decode(query_len=2), ValueError, ("query_len", "4 * 2", "got 4")),
    "rows-ragged-bound": Wrong(
        lambda w: w.decode(query_len=-1, cu_query_lens=i32(0, 1, 2, 3, 4)), ValueError, ("query_len", "-1")
    ),
    # --- heads and dims ---
    "heads-not-multiple": Wrong(
        lambda w: w.decode(query=w.query[:, :7], out=w.out[:, :7]), ValueError, ("heads=7", "kv_heads=2")
    ),
    "heads-none": Wrong(lambda w: w.decode(query=w.query[:, :0], out=w.out[:, :0]), ValueError, ("heads", "got 0")),
    "k_dim-not-multiple-of-16": Wrong(
        lambda w: w.decode(query=w.query[..., :40], cache=(w.cache.bases[0][..., :40], w.cache.bases[1])),
        ValueError, ("k_dim", "multiple of 16", "40"),
    ),
    "k_dim-mismatch": Wrong(lambda w: w.decode(query=w.query[..., :48]), ValueError, ("key_cache", "48", "64")),
    "v_dim-too-large": Wrong(
        lambda w: w.decode_new(cache=(w.cache.bases[0], torch.zeros(14, 16, 2, 272))), ValueError, ("v_dim", "272")
    ),
    # --- cache ---
    "cache-dtype": Wrong(
        lambda w: w.decode(cache=w.quantised(torch.float16)), TypeError, ("key_cache", "float32", "float16")
    ),
    "cache-uint8": Wrong(
        lambda w: w.decode(cache=w.quantised(torch.uint8), k_scale=1.0, v_scale=1.0),
        TypeError, ("key_cache", "uint8", ".view(torch.float8_e4m3fn)"),
    ),
    "cache-two-dtypes": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], w.cache.bases[1].half())), TypeError, ("float32", "float16")
    ),
    "cache-pages-differ": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], w.cache.bases[1][:5])), ValueError, ("value", "14", "5")
    ),
    "cache-3d": Wrong(
        lambda w: w.decode(cache=tuple(base[0] for base in w.cache.bases)), ValueError, ("16, 2, 64",)
    ),
    "cache-strides": Wrong(
        lambda w: w.decode(cache=tuple(strided(base) for base in w.cache.bases)),
        ValueError,
        ("key_cache", "stride 1", "2]"),
    ),
    "cache-device": Wrong(
        lambda w: w.decode(cache=tuple(base.to("meta") for base in w.cache.bases)), ValueError, ("key_cache", "meta")
    ),
    "cache-two-devices": Wrong(
        lambda w: w.decode(cache=(w.cache.bases[0], w.cache.bases[1].to("meta"))), ValueError, ("cpu", "meta")
    ),
    "k_scale-missing": Wrong(
        lambda w: w.decode(cache=w.quantised(), v_scale=1.0), ValueError, ("k_scale", "int8", "None")
    ),
    "v_scale-missing": Wrong(
        lambda w: w.decode(cache=w.quantised(torch.float8_e4m3fn), k_scale=1.0),
        ValueError, ("v_scale", "float8_e4m3fn", "None"),
    ),
    "k_scale-device": Wrong(
        lambda w: w.decode(cache=w.quantised(), k_scale=torch.ones(2, device="meta"), v_scale=1.0),
        ValueError, ("k_scale", "meta"),
    ),
    "layer-superfluous": Wrong(lambda w: w.decode(layer=0), ValueError, ("layer", "left out", "got 0")),
    # --- out ---
    "out-dtype-conflict": Wrong(lambda w: w.decode(out_dtype=torch.float16), TypeError, ("out", "float16", "float32")),
    "out-over-query": Wrong(lambda w: w.decode(out=w.query), ValueError, ("out", "overlap", "query")),
    "out-over-part-of-query": Wrong(lambda w: w.decode(**query_slice(w)), ValueError, ("out", "overlap", "query")),
    "out-over-key-cache": Wrong(
        lambda w: w.decode(out=out_over(w, w.cache.bases[0])), ValueError, ("out", "overlap", "key_cache")
    ),
    "out-over-value-cache": Wrong(
        lambda w: w.decode(out=out_over(w, w.cache.bases[1])), ValueError, ("out", "overlap", "value_cache")
    ),
    "out-over-gate": Wrong(
        lambda w: w.decode(gate=w.out[:, :, 0]), ValueError, ("out", "overlap", "gate")
    ),
    "out-over-itself": Wrong(
        lambda w: w.decode(out=torch.zeros(1, 8, 64).expand(4, 8, 64)),
        ValueError, ("out", "overlap itself", "[0, 64, 1]"),
    ),
    "out-over-itself-in-part": Wrong(
        lambda w: w.decode(out=torch.zeros(4 * 8 * 64).as_strided((4, 8, 64), (512, 32, 1))),
        ValueError, ("out", "overlap itself", "[512, 32, 1]"),
    ),
    # --- workspace ---
    "workspace-small": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=aligned_bytes(split_plan(w).workspace_bytes - 1)),
        ValueError, ("workspace", "at least", "33279"),
    ),
    "workspace-misaligned": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=aligned_bytes(1 << 16, 16)),
        ValueError, ("workspace", "256", "0x"),
    ),
    "workspace-dtype": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=torch.zeros(1 << 16)),
        TypeError, ("workspace", "uint8", "float32"),
    ),
    "workspace-2d": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=aligned_bytes(1 << 16).view(2, -1)),
        ValueError, ("workspace", "[2, 32768]"),
    ),
    "workspace-strides": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=aligned_bytes(1 << 17)[::2]), ValueError, ("workspace", "[2]")
    ),
    "workspace-device": Wrong(
        lambda w: w.decode(plan=split_plan(w), workspace=aligned_bytes(1 << 16).to("meta")),
        ValueError, ("workspace", "meta"),
    ),
    "workspace-is-out": Wrong(
        lambda w: w.decode(
            plan=w.plan(), workspace=(memory := aligned_bytes(1 << 16)),
            out=memory.view(torch.float32)[: 4 * 512].view(4, 8, 64),
        ),
        ValueError, ("out", "overlap", "workspace"),
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
        lambda w: w.decode(plan=w.plan(query=w.query[:, :4])), ValueError, ("plan", "heads=4", "got 8")
    ),
    "plan-dtype": Wrong(
        lambda w: w.decode(plan=w.plan(query=w.query.half(), cache=w.quantised())),
        ValueError, ("plan", "dtype='float16'"),
    ),
    "plan-kernel": Wrong(
        lambda w: w.decode(plan=replace(w.plan(), kernel="portable")), ValueError, ("triton", "cpu")
    ),
    "plan-hopper": Wrong(
        lambda w: w.decode(plan=replace(w.plan(), kernel="hopper")), ValueError, ("backend 'gluon'", "cpu")
    ),
    "plan-against-backend": Wrong(
        lambda w: w.decode(plan=w.plan(), backend="triton"), ValueError, ("backend", "triton", "plan.kernel='ops'")
    ),
    "plan-not-invariant": Wrong(
        lambda w: w.decode(plan=w.plan(), batch_invariant=True), ValueError, ("batch_invariant", "plan")
    ),
    "backend-interpret": Wrong(
        lambda w: w.decode(backend="interpret"),
        ValueError, ("interpret", "TRITON_INTERPRET=1"),
    ),
    # --- gradients ---
    "gradient-query": Wrong(
        lambda w: w.decode(query=w.query.requires_grad_()), NotImplementedError, ("query", "requires_grad=True")
    ),
    "gradient-gate": Wrong(
        lambda w: w.decode(gate=w.gate.requires_grad_()), NotImplementedError, ("gate", "requires_grad=True")
    ),
    "gradient-sinks": Wrong(
        lambda w: w.decode(sinks=w.sinks.requires_grad_()), NotImplementedError, ("sinks", "requires_grad=True")
    ),
    "gradient-cache": Wrong(
        lambda w: w.decode(cache=tuple(base.clone().requires_grad_() for base in w.cache.bases)),
        NotImplementedError, ("cache", "requires_grad=True"),
    ),
    # --- data, on request ---
    "validate-page": Wrong(
        lambda w: w.decode(block_table=w.table.index_fill(1, i32(1).long(), 99), validate=True),
        ValueError, ("block_table", "request 0", "got 99"),
    ),
    "validate-table": Wrong(
        lambda w: w.decode(seq_lens=i32(20, 5, 49, 33), validate=True), ValueError, ("request 2", "48", "3 blocks")
    ),
    "validate-rows": Wrong(
        lambda w: w.decode(cu_query_lens=i32(0, 1, 3, 4, 4), validate=True), ValueError, ("query_len", "request 1", "2")
    ),
}  # fmt: skip

OTHERS = {
    # --- swa_decode_gated ---
    "gated-splits-zero": Wrong(lambda w: w.gated(splits=0), ValueError, ("splits", "got 0")),
    "gated-splits-bool": Wrong(lambda w: w.gated(splits=True), TypeError, ("splits", "True")),
    "gated-splits-grid": Wrong(lambda w: w.gated(splits=65536), ValueError, ("splits", "65536")),
    "gated-pack-zero": Wrong(lambda w: w.gated(pack=0), ValueError, ("pack", "got 0")),
    "gated-pack-divides": Wrong(lambda w: w.gated(pack=2), ValueError, ("query_len=1", "pack=2")),
    "gated-pack-rows": Wrong(
        lambda w: w.gated(
            query=w.query.expand(4, 8, 64).repeat(20, 1, 1), output=w.out.repeat(20, 1, 1), gate=w.gate.repeat(20, 1),
            query_len=20, pack=20,
        ),
        ValueError, ("pack", "64", "pack=20", "group=4"),
    ),
    "gated-output-shape": Wrong(lambda w: w.gated(output=w.out[:2]), ValueError, ("output", "[2, 8, 64]")),
    "gated-output-dtype": Wrong(lambda w: w.gated(output=w.out.half()), TypeError, ("output", "float16")),
    "gated-output-none": Wrong(lambda w: w.gated(output=None), TypeError, ("output", "NoneType")),
    "gated-gate-none": Wrong(lambda w: w.gated(gate=None), TypeError, ("gate", "NoneType")),
    "gated-scale-nan": Wrong(lambda w: w.gated(scale=float("nan")), ValueError, ("scale", "nan")),
    "gated-window-none": Wrong(lambda w: w.gated(window=0), ValueError, ("window", "got 0")),
    "gated-key-cache": Wrong(lambda w: w.gated(key_cache=w.cache.bases[0][0]), ValueError, ("16, 2, 64",)),
    # --- append ---
    "append-key-kind": Wrong(lambda w: w.append(key=w.key.tolist()), TypeError, ("key", "list")),
    "append-key-dtype": Wrong(
        lambda w: w.append(key=w.key.half(), value=w.value.half()),
        TypeError, ("key", "float16"),
    ),
    "append-key-heads": Wrong(lambda w: w.append(key=w.key[:, :1]), ValueError, ("key", "[4, 1, 64]")),
    "append-key-2d": Wrong(lambda w: w.append(key=w.key[0]), ValueError, ("key", "[2, 64]")),
    "append-value-dim": Wrong(lambda w: w.append(value=w.value[..., :32]), ValueError, ("value", "[4, 2, 32]")),
    "append-value-rows": Wrong(lambda w: w.append(value=w.value[:3]), ValueError, ("value", "4", "3")),
    "append-value-strides": Wrong(lambda w: w.append(value=strided(w.value)), ValueError, ("value", "128, 2]")),
    "append-value-device": Wrong(lambda w: w.append(value=w.value.to("meta")), ValueError, ("value", "meta")),
    "append-slots-dtype": Wrong(
        lambda w: w.append(slot_mapping=w.slots.float()),
        TypeError, ("slot_mapping", "float32"),
    ),
    "append-slots-2d": Wrong(lambda w: w.append(slot_mapping=w.slots[None]), ValueError, ("slot_mapping", "[1, 4]")),
    "append-slots-long": Wrong(
        lambda w: w.append(slot_mapping=torch.arange(5)), ValueError, ("slot_mapping", "at most 4", "[5]")
    ),
    "append-slots-strides": Wrong(
        lambda w: w.append(slot_mapping=strided(w.slots)),
        ValueError, ("slot_mapping", "[2]"),
    ),
    "append-scale-missing": Wrong(
        lambda w: w.append(cache=w.quantised(), k_scale=1.0), ValueError, ("v_scale", "int8", "None")
    ),
    "append-scale-zero": Wrong(lambda w: w.append(k_scale=0.0), ValueError, ("k_scale", "positive", "0.0")),
    "append-scale-negative": Wrong(lambda w: w.append(v_scale=-2), ValueError, ("v_scale", "positive", "-2")),
    "append-scale-shape": Wrong(lambda w: w.append(k_scale=torch.ones(4)), ValueError, ("k_scale", "[2]", "[4]")),
    "append-cache-uint8": Wrong(
        lambda w: w.append(cache=w.quantised(torch.uint8), k_scale=1.0, v_scale=1.0), TypeError, ("cache", "uint8")
    ),
    "append-layer": Wrong(lambda w: w.append(layer=1), ValueError, ("layer", "left out", "1")),
    "append-gradient": Wrong(
        lambda w: w.append(value=w.value.requires_grad_()), NotImplementedError, ("value", "requires_grad=True")
    ),
    # --- merge_states ---
    "merge-kind": Wrong(lambda w: w.merge(outs=[w.outs]), TypeError, ("outs", "list")),
    "merge-dtype": Wrong(lambda w: w.merge(outs=w.outs.double()), TypeError, ("outs", "float64")),
    "merge-3d": Wrong(lambda w: w.merge(outs=w.outs[0]), ValueError, ("outs", "[4, 8, 64]")),
    "merge-no-parts": Wrong(lambda w: w.merge(outs=w.outs[:0], lses=w.lses[:0]), ValueError, ("outs", "[0, 4, 8, 64]")),
    "merge-strides": Wrong(lambda w: w.merge(outs=strided(w.outs)), ValueError, ("outs", "128, 2]")),
    "merge-lses-shape": Wrong(lambda w: w.merge(lses=w.lses[:1]), ValueError, ("lses", "[1, 4, 8]")),
    "merge-lses-dtype": Wrong(lambda w: w.merge(lses=w.lses.half()), TypeError, ("lses", "float16")),
    "merge-lses-device": Wrong(lambda w: w.merge(lses=w.lses.to("meta")), ValueError, ("lses", "meta")),
    "merge-sinks": Wrong(lambda w: w.merge(sinks=w.sinks[:3]), ValueError, ("sinks", "[3]")),
    "merge-gate": Wrong(lambda w: w.merge(gate=w.gate[:3]), ValueError, ("gate", "[3, 8]")),
    "merge-out_dtype": Wrong(lambda w: w.merge(out_dtype=torch.int8), TypeError, ("out_dtype", "int8")),
    "merge-gradient": Wrong(
        lambda w: w.merge(outs=w.outs.requires_grad_()), NotImplementedError, ("outs", "requires_grad=True")
    ),
    # --- plan_for, warmup ---
    "plan_for-window": Wrong(lambda w: w.plan(window=0), ValueError, ("window", "got 0")),
    "plan_for-max_requests": Wrong(lambda w: w.plan(max_requests=-1), ValueError, ("max_requests", "-1")),
    "plan_for-query_len": Wrong(lambda w: w.plan(query_len=0), ValueError, ("query_len", "got 0")),
    "plan_for-table": Wrong(lambda w: w.plan(block_table=w.table[0]), ValueError, ("block_table", "[3]")),
    "plan_for-table-kind": Wrong(lambda w: w.plan(block_table=w.table.tolist()), TypeError, ("block_table", "list")),
    "plan_for-backend": Wrong(lambda w: w.plan(backend="fast"), ValueError, ("backend", "'fast'")),
    "plan_for-backend-device": Wrong(lambda w: w.plan(backend="triton"), ValueError, ("triton", "cpu")),
    "plan_for-cache": Wrong(lambda w: w.plan(cache=w.query), TypeError, ("cache", "Tensor")),
    "plan_for-reach": Wrong(
        lambda w: w.plan(block_table=torch.zeros(1, 1 << 27, dtype=torch.int8).int().expand(4, -1)),
        ValueError, ("block * max_blocks", "134217728"),
    ),
    "warmup-plan": Wrong(lambda w: warmup("plan", w.query, w.cache), TypeError, ("plan", "str")),
    "warmup-query": Wrong(lambda w: warmup(w.plan(), w.query[:, :4], w.cache), ValueError, ("plan", "heads=8", "4")),
    # --- check_inputs ---
    "check-window": Wrong(lambda w: w.check(window=True), TypeError, ("window", "True")),
    "check-page": Wrong(lambda w: w.check(block_table=w.table - 100), ValueError, ("block_table", "request 0", "14")),
    "check-table-kind": Wrong(lambda w: w.check(block_table=[[0]]), TypeError, ("block_table", "list")),
    "check-table-shape": Wrong(lambda w: w.check(block_table=w.table[:2]), ValueError, ("seq_lens", "[2]", "[4]")),
    # --- PagedCache ---
    "cache-layout-kind": Wrong(lambda w: PagedCache(w.cache.bases, 3), TypeError, ("layout", "3")),
    "cache-layout-axis": Wrong(
        lambda w: PagedCache(w.cache.bases, "pages block heads dim"), ValueError, ("layout", "pages block heads dim")
    ),
    "cache-base-kind": Wrong(lambda w: PagedCache([1, 2], "pages block kv_heads dim"), TypeError, ("base", "int")),
    "cache-base-count": Wrong(
        lambda w: PagedCache(w.cache.bases[0], "pages block kv_heads dim"),
        ValueError, ("pages block kv_heads dim", "1"),
    ),
    "cache-base-strides": Wrong(
        lambda w: PagedCache(strided(w.cache.bases[0]), "pages block kv_heads (kv dim)"), ValueError, ("stride", "2)")
    ),
    "cache-kv-axis": Wrong(
        lambda w: PagedCache(torch.zeros(3, 4, 16, 2, 64), "kv pages block kv_heads dim"), ValueError, ("kv", "(3, 4")
    ),
    "cache-packed-dims": Wrong(
        lambda w: PagedCache(torch.zeros(4, 2, 16, 128), "pages kv_heads block (kv dim)", k_dim=96, v_dim=64),
        ValueError, ("k_dim=96", "v_dim=64", "128"),
    ),
    "cache-empty-layers": Wrong(
        lambda w: PagedCache.empty("pages block kv_heads dim", pages=1, block=1, kv_heads=1, k_dim=16, layers=2),
        ValueError, ("layers", "left out", "2"),
    ),
}  # fmt: skip

LAYERED = {
    "layer-missing": Wrong(lambda w: w.decode(), ValueError, ("layer", "must be given", "None")),
    "layer-beyond": Wrong(lambda w: w.decode(layer=3), ValueError, ("layer", "at most 2", "3")),
    "layer-negative": Wrong(lambda w: w.decode(layer=-1), ValueError, ("layer", "at least 0", "-1")),
    "layer-bool": Wrong(lambda w: w.decode(layer=True), TypeError, ("layer", "True")),
    "layer-append-missing": Wrong(lambda w: w.append(), ValueError, ("layer", "must be given", "None")),
    "layer-append-beyond": Wrong(lambda w: w.append(layer=3), ValueError, ("layer", "at most 2", "3")),
}

TABLE = {**DECODE, **OTHERS, **LAYERED}


def refuse(name: str) -> str:
    """Make one wrong call; return what is wrong with the way it was refused, or an empty text."""
    wrong = TABLE[name]
    world = World("layers pages block kv_heads dim", 3) if name in LAYERED else World()
    before = [base.clone() for base in world.cache.bases]
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
    if not (world.out == UNTOUCHED).all():
        return f"{name}: out was written"
    if not all(same_bits(base, old) for base, old in zip(world.cache.bases, before, strict=True)):
        return f"{name}: the cache was written"
    return ""


@pytest.mark.parametrize("name", TABLE)
def test_wrong_arguments_are_refused(name):
    assert refuse(name) == ""


def test_the_valid_arguments_are_valid():
    world = World()
    assert world.decode() is world.out
    world.gated()
    world.append()
    world.merge()
    world.check()
    warmup(world.plan(), world.query, world.cache)


def test_errors_are_the_same_without_asserts():
    program = "import sys; from tests.torch import test_errors; sys.exit(test_errors.main())"
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
    complaints = [complaint for complaint in map(refuse, TABLE) if complaint]
    print("\n".join(complaints) or f"{len(TABLE)} refused")
    return bool(complaints)


# --- what looks wrong and is right ---


def test_out_may_be_the_column_slice_beside_the_query():
    world = World()
    fused = torch.full((4, 3, 8, 64), UNTOUCHED)
    fused[:, 0] = world.query
    out = world.decode(query=fused[:, 0], out=fused[:, 1])
    assert same_bits(out.contiguous(), swa_decode(*world.step, window=16))
    assert same_bits(fused[:, 0].contiguous(), world.query)
    assert (fused[:, 2] == UNTOUCHED).all()


def test_out_may_be_every_other_row_of_a_buffer_with_the_query():
    world = World()
    rows = torch.full((8, 8, 64), UNTOUCHED)
    rows[::2] = world.query
    out = world.decode(query=rows[::2], out=rows[1::2])
    assert same_bits(out.contiguous(), swa_decode(*world.step, window=16))


def test_gradients_are_no_error_without_grad_mode():
    world = World()
    world.query.requires_grad_()
    with torch.no_grad():
        world.decode()


@pytest.mark.parametrize("scale", [0.0, 0, -1.5])
def test_any_finite_scale_is_legal(scale):
    assert World().decode(scale=scale).isfinite().all()
