"""Host side of the Pallas kernels: arrays and a plan in, kernel calls out. Nothing is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from swa_pallas._call import Append, Operands, Statics, like_all
from swa_pallas._pallas._append import swa_append
from swa_pallas._pallas._backend import launch
from swa_pallas._pallas._combine import swa_decode_combine
from swa_pallas._pallas._split import swa_decode_split
from swa_plan import Plan

Written = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]
"""Types of an output and of its LSE, where that is wanted."""


def decode(
    operands: Operands, *, plan: Plan, statics: Statics, native_fp8: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Run split and, with more than one split, combine; return the output and its LSE or None."""
    tokens, heads, _ = operands.query.shape
    requests = operands.block_table.shape[0]
    sinks, gate = operands.sinks, operands.gate
    finished: Written = (
        like_all((tokens, heads, statics.v_dim), statics.out_dtype, operands),
        like_all((tokens, heads), jnp.float32, operands) if statics.return_lse else None,
    )
    written = finished
    if plan.splits > 1:
        operands = operands._replace(sinks=None, gate=None)
        written = (
            like_all((tokens, plan.splits, heads, statics.v_dim), jnp.float32, operands),
            like_all((tokens, plan.splits, heads), jnp.float32, operands),
        )

    def kernel(operands: Operands, *outputs: Any) -> None:
        swa_decode_split(
            operands, output_pair(outputs),
            plan=plan, statics=statics, native_fp8=native_fp8, interpret=interpret,
        )  # fmt: skip

    results = launch(
        kernel, (operands,), present(written), grid=(plan.programs(requests), plan.splits),
        warps=plan.warps, stages=plan.stages, name="swa_decode_split", interpret=interpret,
    )  # fmt: skip
    if plan.splits > 1:
        return combine(results[0], results[1], sinks, gate, finished, natural=False, interpret=interpret)
    return output_pair(results)


def merge(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, out_dtype: str, *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Merge ``[parts, tokens, heads, v_dim]`` with natural LSEs ``[parts, tokens, heads]``."""
    parts = (outs, lses, sinks, gate)
    written: Written = (
        like_all(outs.shape[1:], out_dtype, parts), like_all(lses.shape[1:], jnp.float32, parts)
    )  # fmt: skip
    return combine(*parts, written, natural=True, interpret=interpret)


def combine(
    partial: jax.Array, partial_lse: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, written: Written, *,
    natural: bool, interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Launch the combine kernel."""
    tokens, heads, _ = written[0].shape

    def kernel(partial: Any, partial_lse: Any, options: tuple[Any, Any], *outputs: Any) -> None:
        swa_decode_combine(
            partial, partial_lse, *options, output_pair(outputs), natural=natural, interpret=interpret
        )  # fmt: skip

    results = launch(
        kernel, (partial, partial_lse, (sinks, gate)), present(written), grid=(tokens, heads),
        warps=1, stages=1, name="swa_decode_combine", interpret=interpret,
    )  # fmt: skip
    return output_pair(results)


def append(operands: Append, *, statics: Statics, limit: float | None, interpret: bool) -> tuple[jax.Array, ...]:
    """Write rows of keys and values into their slots; the results take the bases' memory where JAX may reuse it."""
    rows, kv_heads = operands.slot_mapping.shape[0], operands.key.shape[1]
    inputs = operands._replace(bases=())
    first = len(jax.tree.leaves(inputs))

    def kernel(inputs: Append, bases: tuple[Any, ...], *outputs: Any) -> None:
        swa_append(inputs._replace(bases=bases), outputs, statics=statics, limit=limit, interpret=interpret)

    results = launch(
        kernel, (inputs, operands.bases), [like_all(base.shape, base.dtype, operands) for base in operands.bases],
        grid=(rows, kv_heads), warps=1, stages=1, name="swa_append", interpret=interpret,
        aliases={first + i: i for i in range(len(operands.bases))},
    )  # fmt: skip
    return tuple(results)


def present(written: Written) -> list[jax.ShapeDtypeStruct]:
    """Return the outputs that a kernel has."""
    return [each for each in written if each is not None]


def output_pair(outputs: Sequence[Any]) -> tuple[Any, Any]:
    """Return an output and its LSE, None where the kernel has none."""
    return outputs[0], outputs[1] if len(outputs) > 1 else None
