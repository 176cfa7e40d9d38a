"""The append kernel: one (row, kv head) of new keys and values into its slot.

Sections, names and order are those of ``swa_torch._triton._append``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from swa_pallas._call import Append, Statics
from swa_pallas._pallas._addressing import cache_index, load_number
from swa_pallas._pallas._backend import divide, load, load_one, program_id, store
from swa_pallas._pallas._pieces import arange
from swa_plan._shapes import next_power_of_two


def narrow(x: jax.Array, scale: Any, limit: float, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """Return ``cast(clip(x / scale))``, rounded half to even; clipping first, because casts differ on overflow."""
    x = x.astype(jnp.float32)
    quotient = divide(x, jnp.zeros_like(x) + scale, interpret=interpret)
    known = quotient == quotient
    clipped = jnp.minimum(jnp.maximum(jnp.where(known, quotient, 0.0), -limit), limit)
    if dtype == jnp.int8:
        # Adding 1.5 * 2**23 leaves no fraction bits, so the sum is rounded half to even; XLA would drop both terms.
        rounded = jnp.round(clipped) if interpret else (clipped + 12582912.0) - 12582912.0
        return rounded.astype(jnp.int32).astype(jnp.int8)
    return jnp.where(known, clipped, jnp.nan).astype(dtype)


def append_head(
    source: Any, base: Any, at: Any, scale: Any, row: Any, head: Any, written: jax.Array, limit: float | None, *,
    interpret: bool,
) -> None:  # fmt: skip
    """Copy one head's vector into its slot."""
    dim = source.shape[2]
    d = arange(next_power_of_two(dim))
    mask = written & (d < dim)
    value = load(source, (row, head, d), mask)
    if limit is not None:
        value = narrow(value, scale, limit, base.dtype, interpret=interpret)
    store(base, at(d), value, mask)


def swa_append(
    operands: Append, bases: tuple[Any, ...], *, statics: Statics, limit: float | None, interpret: bool
) -> None:
    """Append one (row, kv head); grid ``(rows, kv_heads)``. ``bases`` are the outputs, in the memory of the inputs."""
    row = program_id(0)
    head = program_id(1)
    block = operands.bases[0].shape[statics.layout.axes.index("block")]
    position = load_one(operands.slot_mapping, row)
    given_layer = None if operands.layer is None else load_one(operands.layer, 0)
    layer, layer_exists = statics.existing_layer(given_layer, bases[0])
    slots = statics.pages * block
    written = (position >= 0) & layer_exists
    if slots <= jnp.iinfo(position.dtype).max:
        written = written & (position < slots)
    position = jnp.where(written, position, 0)
    page, slot = (each.astype(jnp.int32) for each in (position // block, position % block))
    for kv, source, scale in (
        (0, operands.key, load_number(operands.k_scale, statics.k_scale, head)),
        (1, operands.value, load_number(operands.v_scale, statics.v_scale, head)),
    ):
        at = cache_index(statics, kv, page, slot, head, layer)
        append_head(source, bases[-1 if kv else 0], at, scale, row, head, written, limit, interpret=interpret)
