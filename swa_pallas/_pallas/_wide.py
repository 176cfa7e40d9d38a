"""64-bit addresses for caches of one-byte elements between 2 and 4 GiB.

Pallas-Triton computes offsets in 32 bits unless an array has more than 2**32 *bytes*, and Triton extends them by sign:
an element beyond 2**31 of a smaller one-byte array would be read before its start. JAX offers no public way to widen
them, so the two primitives here hand JAX's own lowering rules a larger leading axis, which decides the width of offsets
and nothing else. They use JAX's internals, proved for the versions that are tested; where those have moved this module
cannot be imported, and such caches are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.triton import lowering
from jax._src.state import discharge
from jax._src.state.primitives import get_ref_and_transforms
from jax.core import ShapedArray
from jax.extend.core import Primitive


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
        first, *rest = info.full_shape_dtype.shape
        larger = ShapedArray((4 * first, *rest), info.full_shape_dtype.dtype)
        info = dataclasses.replace(info, full_shape_dtype=larger)
        return rule(context.replace(block_infos=[info, *others]), *arguments, **params)

    lowering.register_lowering(primitive)(lower)
    discharge.register_discharge_rule(primitive)(discharge._discharge_rules[original])
    return primitive


_load_p = _wide_version(pallas_primitives.load_p, "swa_wide_load")
_swap_p = _wide_version(pallas_primitives.swap_p, "swa_wide_store")
