"""64-bit offsets into one-byte caches of 2 to 4 GiB, which Pallas-Triton uses for arrays of more than 4 GiB only.

Its 32-bit offsets are extended by sign, so an element beyond 2**31 would be read before the array's start. JAX has no
public way to widen them, so the two primitives here hand JAX's own lowering rules a larger leading axis, which decides
the width of offsets and nothing else. They use JAX's internals, proved for the versions that are tested; where those
have moved this module cannot be imported, and such caches are refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.triton import lowering
from jax._src.state import discharge
from jax._src.state.primitives import get_ref_and_transforms
from jax.core import ShapedArray
from jax.extend.core import Primitive

BYTES_WITH_64_BITS = 1 << 33
"""Arrays of this size have 64-bit offsets (from more than 2**32 on)."""


def load(reference: Any, mask: jax.Array, other: jax.Array) -> jax.Array:
    """``load`` with 64-bit offsets."""
    array, transforms = get_ref_and_transforms(reference, None, "load")
    flat, tree = jax.tree.flatten((array, transforms, mask, other))
    return _load_p.bind(*flat, args_tree=tree, cache_modifier=None, eviction_policy=None, is_volatile=False)


def store(reference: Any, value: jax.Array, mask: jax.Array) -> None:
    """``store`` with 64-bit offsets."""
    array, transforms = get_ref_and_transforms(reference, None, "store")
    flat, tree = jax.tree.flatten((array, transforms, value, mask))
    _swap_p.bind(*flat, args_tree=tree, eviction_policy=None)


def _wide_version(original: Any, name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_effectful_abstract_eval(original.abstract_eval)
    rule = lowering.triton_lowering_rules[original]

    def lower(context: Any, *arguments: Any, **params: Any) -> Any:
        info, *others = context.block_infos
        array = info.full_shape_dtype
        first, *rest = array.shape
        factor = BYTES_WITH_64_BITS // max(1, math.prod(array.shape) * array.dtype.itemsize) + 1
        info = dataclasses.replace(info, full_shape_dtype=ShapedArray((factor * first, *rest), array.dtype))
        return rule(context.replace(block_infos=[info, *others]), *arguments, **params)

    lowering.register_lowering(primitive)(lower)
    discharge.register_discharge_rule(primitive)(discharge._discharge_rules[original])
    return primitive


_load_p = _wide_version(pallas_primitives.load_p, "swa_wide_load")
_swap_p = _wide_version(pallas_primitives.swap_p, "swa_wide_store")
