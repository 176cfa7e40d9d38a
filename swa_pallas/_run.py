"""From checked operands to a backend, chosen where the call is lowered: one jitted function for each operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from swa_pallas import _xla
from swa_pallas._call import Append, Operands, Statics, like_all
from swa_pallas._device import converts_fp8, has_pallas_triton, lowering_device
from swa_pallas._guards import refuse_lowering, refuse_transforms, require_lowering
from swa_pallas._planning import Route

CUDA = ("cuda",)
ANY_DEVICE = "h100"
"""Append and merge are compiled alike for every GPU, so any will do where none is known."""
NO_DEVICE = (
    "lowering for CUDA must know its GPU: this process has none, so pass plan=plan_for(..., "
    "device=DeviceProfile.named('h200')) or lower inside jax.sharding.use_abstract_mesh with an AbstractDevice"
)


@functools.partial(jax.jit, static_argnames=("statics", "route"))
def decode(operands: Operands, *, statics: Statics, route: Route) -> tuple[jax.Array, jax.Array | None]:
    """Run a checked call; return the output and its LSE or None."""
    operands = refuse_transforms(operands, "swa_decode")
    tokens, heads, _ = operands.query.shape
    if not tokens or not operands.block_table.shape[0]:
        out = like_all((tokens, heads, statics.v_dim), statics.out_dtype, operands)
        lse = like_all((tokens, heads), jnp.float32, operands)
        return _full(out, 0), _full(lse, -jnp.inf) if statics.return_lse else None
    operands = stand_in(operands, statics)

    def kernels(operands: Operands, *, interpret: bool) -> tuple[jax.Array, jax.Array | None]:
        from swa_pallas._pallas import _launch

        plan = route.cuda if route.cuda is not None else route.other
        native_fp8 = interpret or converts_fp8(plan)
        return _launch.decode(operands, plan=plan, statics=statics, native_fp8=native_fp8, interpret=interpret)

    def operations(operands: Operands) -> tuple[jax.Array, jax.Array | None]:
        return _xla.decode(operands, plan=route.other, statics=statics)

    device = None if route.cuda is None else route.cuda.device
    return dispatch("swa_decode", route.backend, kernels, operations, operands, device)


@functools.partial(jax.jit, static_argnames=("statics", "limit", "backend"))
def append(
    operands: Append, *, statics: Statics, limit: float | None, backend: str | None = None
) -> tuple[jax.Array, ...]:
    """Return the bases with checked rows written; in place where the caller donates them."""
    operands = refuse_transforms(operands, "append")
    if not operands.slot_mapping.shape[0] or not statics.pages:
        return operands.bases

    def kernels(operands: Append, *, interpret: bool) -> tuple[jax.Array, ...]:
        from swa_pallas._pallas import _launch

        return _launch.append(operands, statics=statics, limit=limit, interpret=interpret)

    def operations(operands: Append) -> tuple[jax.Array, ...]:
        return _xla.append(operands, statics=statics, limit=limit)

    if backend != "interpret" and operands.bases[0].dtype == jnp.float8_e4m3fn and not converts_fp8():
        backend = "xla"  # which converts to fp8 where the chip cannot
    return dispatch("append", backend, kernels, operations, operands, ANY_DEVICE)


@functools.partial(jax.jit, static_argnames=("out_dtype", "backend"))
def merge(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, *, out_dtype: str,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Merge checked partial attentions."""
    parts = refuse_transforms((outs, lses, sinks, gate), "merge_states")
    if not outs.shape[1]:
        shapes = like_all(outs.shape[1:], out_dtype, parts), like_all(lses.shape[1:], jnp.float32, parts)
        return _full(shapes[0], 0), _full(shapes[1], -jnp.inf)

    def kernels(parts: tuple[Any, ...], *, interpret: bool) -> tuple[jax.Array, jax.Array | None]:
        from swa_pallas._pallas import _launch

        return _launch.merge(*parts, out_dtype=out_dtype, interpret=interpret)

    def operations(parts: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        return _xla.merge(*parts, out_dtype=out_dtype)

    return dispatch("merge_states", backend, kernels, operations, parts, ANY_DEVICE)


def dispatch(
    name: str, backend: str | None, kernels: Callable[..., Any], operations: Callable[..., Any], operands: Any,
    device: str | None,
) -> Any:  # fmt: skip
    """Run ``kernels`` or ``operations``: what ``backend`` names, else what the platform that is lowered for wants.

    ``device`` names the GPU that CUDA kernels are for; with None, lowering for CUDA is an error.
    """

    def compiled(operands: Any) -> Any:
        operands = require_lowering(operands, name=name, backend="pallas_triton", platforms=CUDA)
        with lowering_device(device, operands):
            return kernels(operands, interpret=False)

    def unknown_device(operands: Any) -> Any:
        return operations(refuse_lowering(operands, name=name, reason=NO_DEVICE))

    if backend == "pallas_triton":
        return compiled(operands)
    if backend == "interpret":
        return kernels(operands, interpret=True)
    if backend == "xla" or not has_pallas_triton():
        return operations(operands)
    return lax.platform_dependent(operands, cuda=unknown_device if device is None else compiled, default=operations)


def stand_in(operands: Operands, statics: Statics) -> Operands:
    """Put one page, or one column, in the place of an empty cache or table: neither is ever read."""
    if not statics.pages:
        at = statics.layout.axes.index("pages")
        bases = tuple(jnp.zeros((*base.shape[:at], 1, *base.shape[at + 1 :]), base.dtype) for base in operands.bases)
        operands = operands._replace(bases=bases)
    if not statics.max_blocks:
        table = operands.block_table
        operands = operands._replace(block_table=jnp.zeros((table.shape[0], 1), table.dtype))
    return operands


def _full(like: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    filled = jnp.full(like.shape, value, like.dtype)
    axes = tuple(like.manual_axis_type.varying) if like.manual_axis_type is not None else ()
    return lax.pcast(filled, axes, to="varying") if axes else filled
