"""Everything that is Pallas-Triton's own: the only file that imports ``jax.experimental.pallas.triton``.

JAX deprecates that backend since 0.11. Kernels use it through the names below, so that another lowering can take its
place without touching them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

try:
    from swa_pallas._pallas import _wide
except (ImportError, AttributeError, KeyError):  # JAX's internals have moved
    _wide = None

OFFSETS_OF_32_BITS = 1 << 31
"""An array with more elements needs 64-bit offsets, which Pallas-Triton itself uses only beyond 2**32 bytes."""


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


def load(reference: Any, index: tuple[Any, ...], mask: jax.Array, *, wide_offsets: bool = False) -> jax.Array:
    """Load ``reference[index]`` where ``mask``, else 0; ``index`` holds scalars and arrays that broadcast.

    ``wide_offsets`` asks for 64-bit offsets where they can be had: fewer instructions and registers, but more latency
    (0.3 us at batch 1 on an H200).
    """
    at, instead = reference.at[index], jnp.zeros((), reference.dtype)
    wide = _wide if wide_offsets else wide_accesses(reference)
    return plgpu.load(at, mask=mask, other=instead) if wide is None else wide.load(at, mask, instead)


def load_one(reference: Any, *index: Any) -> jax.Array:
    """Load one element."""
    return plgpu.load(reference.at[tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)])


def store(reference: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array) -> None:
    """Store ``value`` at ``reference[index]`` where ``mask``."""
    wide = wide_accesses(reference)
    if wide is None:
        plgpu.store(reference.at[index], value, mask=mask)
    else:
        wide.store(reference.at[index], value, mask)


def wide_accesses(reference: Any) -> Any:
    """Return the accesses with 64-bit offsets where an array needs them, else None.

    Raises:
        NotImplementedError: it needs them, and this JAX has no way to make them.
    """
    elements = math.prod(reference.shape)
    if elements <= OFFSETS_OF_32_BITS or elements * reference.dtype.itemsize > 1 << 32:
        return None
    if _wide is None:
        raise NotImplementedError(
            f"cache must have at most 2**31 elements (or more than 4 GiB) for backend 'pallas_triton' with jax "
            f"{jax.__version__}: use backend 'xla', got {reference.dtype.name}{list(reference.shape)}"
        )
    return _wide


def dot(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """Return ``a @ b`` (``a @ b.T``) in fp32, with full fp32 products whatever JAX's global precision says."""
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def divide(a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """Return ``a / b`` in fp32, correctly rounded; Triton's own division is off by up to two units."""
    if interpret:
        # Divided by one number for all, XLA would multiply by its reciprocal, which rounds differently.
        return a / jnp.where(jnp.isnan(a), 1.0, b)
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
