"""Compile a plan's calls now, so that nothing compiles while serving."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from swa_pallas._api import swa_decode
from swa_pallas._cache import Cache, as_paged_cache
from swa_plan import Plan
from swa_plan._checks import check_integer


def warmup(
    plan: Plan,
    query: Any,
    cache: Cache,
    *,
    requests: Sequence[int] | None = None,
    index_dtype: Any = jnp.int32,
    layer: int | jax.Array | None = None,
    **options: Any,
) -> None:
    """Compile ``swa_decode`` for this plan at each batch size that will be served.

    XLA compiles for shapes: a serving loop pads its batches to a few sizes ("buckets"), with ``seq_lens == 0`` rows
    that cost nothing and stay zero, and warms up those. A jitted step of your own has its own compilation to warm up.
    Runs requests without keys: nothing of the cache is read.

    Args:
        plan: the plan that calls will pass.
        query: an array or ``ShapeDtypeStruct`` with the calls' heads and dtype; its number of tokens is not looked at
            unless rows are ragged.
        cache: the cache of the calls.
        requests: batch sizes; None means ``plan.problem.max_requests``.
        index_dtype: dtype of tables and lengths.
        layer: any layer, where the cache has layers (an array where calls pass one).
        options: what calls will pass besides, such as ``gate=``, ``sinks=``, ``softcap=``, ``return_lse=``; arrays
            count by dtype.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``swa_decode``.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    problem = plan.problem
    paged = as_paged_cache(cache)
    layer = 0 if paged.layout.has_layers and layer is None else layer
    base = paged.bases[0]
    # As calls will find them: arrays that were put on a device are another signature than those left to JAX.
    committed = isinstance(base, jax.Array) and base.committed and len(base.devices()) == 1
    zeros = functools.partial(jnp.zeros, device=next(iter(base.devices())) if committed else None)
    for count in (problem.max_requests,) if requests is None else requests:
        check_integer("requests", count, minimum=0, maximum=problem.max_requests)
        tokens = query.shape[0] if problem.ragged else count * problem.query_len
        per_call = dict(options)
        if problem.ragged:
            per_call["cu_query_lens"] = zeros((count + 1,), index_dtype)
        for name in ("kv_start", "kv_end"):
            if per_call.get(name) is not None:
                per_call[name] = zeros((count,), index_dtype)
        if per_call.get("gate") is not None:
            per_call["gate"] = zeros((tokens, problem.heads), per_call["gate"].dtype)
        result = swa_decode(
            zeros((tokens, problem.heads, problem.k_dim), query.dtype), paged,
            zeros((count, problem.max_blocks), index_dtype), zeros((count,), index_dtype),
            window=problem.window, query_len=problem.query_len, plan=plan, layer=layer, **per_call,
        )  # fmt: skip
        jax.block_until_ready(result)
