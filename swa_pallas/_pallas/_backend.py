"""Everything that is Pallas-Triton's own: the only file that imports ``jax.experimental.pallas.triton``.

JAX deprecates that backend since 0.11. Kernels use it through the names below, so that another lowering can take its
place without touching them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

PLATFORMS = ("cuda",)
"""Platforms that the compiled kernels lower for."""


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[Any],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    name: str,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Run ``kernel(*references of arrays, *references of outputs)`` over ``grid``; operands are whole arrays."""
    return pl.pallas_call(
        kernel,
        out_shape,
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
    )(*arrays)


def program_id(axis: int) -> jax.Array:
    """Return this program's index along a grid axis."""
    return pl.program_id(axis)


def load(reference: Any, index: tuple[Any, ...], mask: jax.Array, other: float | int = 0) -> jax.Array:
    """Load ``reference[index]`` where ``mask``, else ``other``; ``index`` holds scalars and arrays that broadcast."""
    return plgpu.load(reference.at[index], mask=mask, other=jnp.asarray(other, reference.dtype))


def load_one(reference: Any, *index: Any) -> jax.Array:
    """Load one element."""
    return plgpu.load(reference.at[tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)])


def store(reference: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array) -> None:
    """Store ``value`` at ``reference[index]`` where ``mask``."""
    plgpu.store(reference.at[index], value, mask=mask)


def dot(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """Return ``a @ b`` (``a @ b.T``) in fp32, with full fp32 products whatever JAX's global precision says."""
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def divide(a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """Return ``a / b`` in fp32, correctly rounded; Triton's own division is off by up to two units."""
    if interpret:
        return a / b
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    a, b = (jnp.broadcast_to(each, shape) for each in (a, b))
    [quotient] = plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[a, b],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return quotient
