"""Host side of the Pallas kernels: arrays and a plan in, kernel calls out. Nothing is checked here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from swa_pallas._call import Append, Operands, Statics, like_all
from swa_pallas._pallas._append import swa_append
from swa_pallas._pallas._backend import launch
from swa_pallas._pallas._combine import swa_decode_combine
from swa_pallas._pallas._split import swa_decode_split
from swa_plan import Plan


def decode(
    operands: Operands, *, plan: Plan, statics: Statics, native_fp8: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Run split and, with more than one split, combine; return the output and its LSE or None."""
    tokens, heads, _ = operands.query.shape
    requests = operands.block_table.shape[0]
    out = like_all((tokens, heads, statics.v_dim), statics.out_dtype, operands)
    lse = like_all((tokens, heads), jnp.float32, operands) if statics.return_lse else None
    if plan.splits == 1:
        written = (out, lse)
    else:
        written = (
            like_all((tokens, plan.splits, heads, statics.v_dim), jnp.float32, operands),
            like_all((tokens, plan.splits, heads), jnp.float32, operands),
        )
        operands, sinks, gate = operands._replace(sinks=None, gate=None), operands.sinks, operands.gate

    def split_kernel(operands: Operands, *outputs: Any) -> None:
        padded = (*outputs, None)[:2]
        swa_decode_split(operands, padded, plan=plan, statics=statics, native_fp8=native_fp8, interpret=interpret)

    results = launch(
        split_kernel, (operands,), present(written), grid=(plan.programs(requests), plan.splits),
        warps=plan.warps, stages=plan.stages, name="swa_decode_split", interpret=interpret,
    )  # fmt: skip
    if plan.splits == 1:
        return results[0], results[1] if lse is not None else None
    return combine(*results, sinks, gate, (out, lse), natural=False, interpret=interpret)


def merge(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, out_dtype: str, *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Merge ``[parts, tokens, heads, v_dim]`` with natural LSEs ``[parts, tokens, heads]``."""
    written = (
        like_all(outs.shape[1:], out_dtype, outs, lses, sinks, gate),
        like_all(lses.shape[1:], jnp.float32, outs, lses, sinks, gate),
    )
    merged, lse = combine(outs, lses, sinks, gate, written, natural=True, interpret=interpret)
    assert lse is not None
    return merged, lse


def combine(
    partial: jax.Array, partial_lse: jax.Array, sinks: jax.Array | None, gate: jax.Array | None,
    written: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None], *, natural: bool, interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Launch the combine kernel."""
    tokens, heads, _ = written[0].shape

    def combine_kernel(inputs: tuple[Any, Any, Any, Any], *outputs: Any) -> None:
        swa_decode_combine(*inputs, (*outputs, None)[:2], natural=natural, interpret=interpret)

    results = launch(
        combine_kernel, ((partial, partial_lse, sinks, gate),), present(written), grid=(tokens, heads),
        warps=1, stages=1, name="swa_decode_combine", interpret=interpret,
    )  # fmt: skip
    return results[0], results[1] if written[1] is not None else None


def append(operands: Append, *, statics: Statics, limit: float | None, interpret: bool) -> tuple[jax.Array, ...]:
    """Write rows of keys and values into their slots; the results take the bases' memory where JAX may reuse it."""
    rows = operands.slot_mapping.shape[0]
    kv_heads = operands.key.shape[1]
    inputs = operands._replace(bases=())
    first = len(jax.tree.leaves(inputs))
    written = [like_all(base.shape, base.dtype, operands) for base in operands.bases]

    def append_kernel(inputs: Append, bases: tuple[Any, ...], *outputs: Any) -> None:
        swa_append(inputs._replace(bases=bases), outputs, statics=statics, limit=limit, interpret=interpret)

    return tuple(
        launch(
            append_kernel, (inputs, operands.bases), written, grid=(rows, kv_heads),
            warps=1, stages=1, name="swa_append", interpret=interpret,
            aliases={first + i: i for i in range(len(operands.bases))},
        )
    )  # fmt: skip


def present(shapes: tuple[Any, ...]) -> list[Any]:
    """Return the outputs that a kernel has."""
    return [shape for shape in shapes if shape is not None]
