"""An identity that refuses what the kernels cannot do: gradients, ``vmap``, a platform, automatic partitioning.

JAX meets these limits in different places (transformation, lowering), and there the errors of the operations inside
would name none of the caller's arguments. One primitive with its own rules catches each where it arises. It lowers to
nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_UNMAPPED = {
    "swa_decode": "requests (rows of block_table and seq_lens)",
    "append": "rows of key, value and slot_mapping",
    "merge_states": "tokens",
}
"""What a caller folds a mapped axis into."""

_guard_p = Primitive("swa_guard")
_guard_p.multiple_results = True


def refuse_transforms(tree: Any, name: str) -> Any:
    """Return ``tree`` unchanged; differentiating or batching it raises ``NotImplementedError`` naming ``name``."""
    return _bind(tree, name=name)


def require_lowering(tree: Any, *, name: str, backend: str, platforms: Sequence[str]) -> Any:
    """Return ``tree`` unchanged; lowering for another platform, or partitioned by the compiler, raises.

    ``ValueError`` names ``backend`` and the platform, or what to wrap in ``shard_map``.
    """
    return _bind(tree, name=name, backend=backend, platforms=tuple(platforms))


def refuse_lowering(tree: Any, *, name: str, reason: str) -> Any:
    """Return ``tree`` unchanged; lowering it raises ``ValueError`` with ``reason``."""
    return _bind(tree, name=name, refusal=reason)


def _bind(tree: Any, **params: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _guard_p.bind(*leaves, **params))


@_guard_p.def_impl
def _evaluate(*arrays: Any, **params: Any) -> Sequence[Any]:
    return arrays


@_guard_p.def_abstract_eval
def _abstract(*avals: Any, **params: Any) -> Sequence[Any]:
    return avals


def _differentiate(primals: Any, tangents: Any, *, name: str, **params: Any) -> Any:
    raise NotImplementedError(
        f"{name} is for inference and has no gradients; wrap its inputs in jax.lax.stop_gradient, got a tangent"
    )


def _batch(arguments: Any, axes: Any, *, name: str, **params: Any) -> Any:
    raise NotImplementedError(
        f"{name} does not support vmap: fold the mapped axis into the {_UNMAPPED[name]}, "
        f"got mapped axes {[axis for axis in axes if axis is not None]}"
    )


def _lower(
    context: mlir.LoweringRuleContext, *values: Any, name: str, backend: str | None = None,
    platforms: tuple[str, ...] = (), refusal: str | None = None,
) -> Sequence[Any]:  # fmt: skip
    if refusal is not None:
        raise ValueError(refusal)
    if backend is None:
        return values
    lowering = tuple(context.platforms or context.module_context.platforms)
    if any(platform not in platforms for platform in lowering):
        raise ValueError(
            f"backend {backend!r} of {name} lowers for {' or '.join(platforms)}, got platform {', '.join(lowering)}"
        )
    devices = getattr(context.module_context.axis_context, "num_devices", None)
    if devices is not None and devices > 1:
        raise ValueError(
            f"{name} is a kernel that the compiler cannot partition: wrap the call in jax.shard_map over kv heads "
            f"(see swa_pallas.cache_specs), got {devices} devices under automatic partitioning"
        )
    # JAX announces the end of the backend at every lowering; docs/jax.md says what happens then. The filter is set
    # here because test runners swap the filters that were set at import.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    return values


ad.primitive_jvps[_guard_p] = _differentiate
batching.primitive_batchers[_guard_p] = _batch
mlir.register_lowering(_guard_p, _lower)
