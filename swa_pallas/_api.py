"""The public decode calls: check everything while JAX traces, plan, then run one jitted function."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from swa_pallas import _run
from swa_pallas._cache import Cache, PagedCache, as_paged_cache
from swa_pallas._call import Operands, Statics
from swa_pallas._inputs import check_inputs
from swa_pallas._planning import problem_of, route
from swa_pallas._validate import (
    as_arrays,
    check_head_options,
    check_layer,
    check_out_dtype,
    check_query_and_cache,
    check_rows,
    check_scalar,
    check_scale,
    check_static,
)
from swa_plan import Plan
from swa_plan._checks import check_integer, check_softcap, check_window
from swa_plan._chosen import SplitsAndPack
from swa_plan._problem import MAX_POSITIONS


def swa_decode(
    query: jax.Array,
    cache: Cache,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    window: int | None,
    gate: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    query_len: int = 1,
    cu_query_lens: jax.Array | None = None,
    kv_start: jax.Array | None = None,
    kv_end: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    layer: int | jax.Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    plan: Plan | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Sliding-window grouped-query decode attention over a paged KV cache.

    Row ``i`` of request ``r`` sits at position ``p = seq_lens[r] - rows + i`` and sees keys ``max(0, p - window + 1)
    .. p``::

        logits = softcap * tanh(scale * k_scale * <query, key> / softcap)      # softcap only if given
        out    = softmax([logits, sink])[:-1] @ (value * v_scale)              # sink only if given
        out    = round(out) * round(sigmoid(gate))                             # gate only if given

    Logits, softmax and sums are fp32; products are taken in the query's dtype. A row that sees nothing is zero, with
    an LSE of ``-inf``. Only visible slots of the cache reach the result. A visible key whose page id is outside ``[0,
    pages)``, or whose position is beyond the table, makes the rows that see it NaN. Algorithm: split-KV decoding
    ("Flash-Decoding", Dao et al., 2023) with the online softmax (Milakov and Gimelshein, 2018).

    A pure function, for use inside ``jax.jit`` (``window``, ``query_len``, ``plan``, ``backend`` and dtypes are static,
    everything else may be traced). The cache is never sliced, transposed or copied. For several devices wrap it in
    ``jax.shard_map`` over kv heads, see ``cache_specs``.

    Args:
        query: ``[tokens, heads, k_dim]``, bf16, fp16 or fp32.
        cache: a ``PagedCache``, or ``(key_cache, value_cache)``, each ``[pages, block, kv_heads, dim]``.
        block_table: ``[requests, max_blocks]``, int32 (int64 under x64): page of each ``block`` positions of a request.
        seq_lens: ``[requests]``, likewise: keys of each request, its newest query rows included; negative counts as 0.
        window: keys a row sees, its own position included; None for full causal attention.
        gate: ``[tokens, heads]`` logits of a sigmoid gate.
        scale: factor of the logits; None means ``k_dim ** -0.5``.
        query_len: rows of each request, or their upper bound with ``cu_query_lens``.
        cu_query_lens: ``[requests + 1]``, cumulative rows. Rows at or after the last are padding; a request with more
            rows than ``query_len`` gets NaN rows.
        kv_start: ``[requests]``: only keys at positions ``>= kv_start`` are visible.
        kv_end: ``[requests]``: only keys at positions ``< kv_end`` are visible.
        sinks: ``[heads]``: one extra logit per head in the denominator, never capped or scaled.
        softcap: positive cap of the logits.
        k_scale: a stored key means ``stored * k_scale``; a number, or fp32 of shape ``[]`` or ``[kv_heads]``. Required
            for quantised caches (fp8 e4m3fn/e5m2, int8).
        v_scale: the same for values.
        layer: layer of a cache with a ``layers`` axis; may be traced (one out of range gives NaN rows).
        return_lse: whether to return the LSE too.
        out_dtype: output dtype; None means the query's.
        plan: a plan from ``plan_for``; it fixes the backend. None plans from the shapes while tracing.
        backend: ``pallas_triton``, ``xla`` or ``interpret``; None takes ``pallas_triton`` where the call is lowered for
            CUDA and ``xla`` elsewhere.
        batch_invariant: make each request's bits independent of batch size, neighbours, position, padding and
            ``query_len``.
        validate: check the data too (it is copied to the host); not while tracing.

    Returns:
        ``out`` ``[tokens, heads, v_dim]``, or ``(out, lse)`` with ``lse`` fp32 ``[tokens, heads]``: natural-log
        log-sum-exp of the logits after scale and softcap, sinks included, before the gate.

    Raises:
        TypeError: kinds or dtypes, or a traced value where a static one is needed.
        ValueError: shapes, ranges, shardings, a plan for another problem, invalid data with ``validate``, or (while
            lowering) a backend on a platform that it does not serve.
        NotImplementedError: gradients, ``vmap``, or a GPU older than sm_80.
        RuntimeError: the backend needs a part of JAX that is gone.
    """
    return _decode(
        query, as_paged_cache(cache), block_table, seq_lens,
        window=window, gate=gate, scale=scale, query_len=query_len, cu_query_lens=cu_query_lens, kv_start=kv_start,
        kv_end=kv_end, sinks=sinks, softcap=softcap, k_scale=k_scale, v_scale=v_scale, layer=layer,
        return_lse=return_lse, out_dtype=out_dtype, plan=plan, backend=backend, batch_invariant=batch_invariant,
        validate=validate,
    )  # fmt: skip


def swa_decode_gated(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    gate: jax.Array,
    *,
    scale: float | jax.Array,
    window: int,
    query_len: int,
    splits: int,
    pack: int = 1,
) -> jax.Array:
    """Gated decode with the original kernel's arguments: splits and packing are the caller's, the output is returned.

    Args:
        query: ``[tokens, heads, k_dim]``, ``tokens == requests * query_len``.
        key_cache: ``[pages, block, kv_heads, k_dim]``.
        value_cache: ``[pages, block, kv_heads, v_dim]``.
        block_table: ``[requests, max_blocks]``, int32 (int64 under x64).
        seq_lens: ``[requests]``, likewise, the query rows included.
        gate: ``[tokens, heads]`` logits.
        scale: factor of the logits.
        window: keys a row sees, its own included.
        query_len: rows of each request, a multiple of ``pack``.
        splits: chunks of the window, at least 1; see ``swa_decode_plan``.
        pack: rows that one program takes, ``pack * group <= 64`` (1: any group).

    Returns:
        ``[tokens, heads, v_dim]`` in the query's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``swa_decode``.
    """
    check_static("splits", splits)
    check_static("pack", pack)
    chosen = SplitsAndPack(check_integer("splits", splits, minimum=1), check_integer("pack", pack, minimum=1))
    if gate is None:
        raise TypeError("gate must be a JAX array, got NoneType")
    result = _decode(
        query, PagedCache.from_kv(key_cache, value_cache), block_table, seq_lens,
        window=window, gate=gate, scale=scale, query_len=query_len, plan=chosen,
    )  # fmt: skip
    assert not isinstance(result, tuple)
    return result


def _decode(
    query: Any, cache: PagedCache, block_table: Any, seq_lens: Any, *, window: Any, gate: Any = None, scale: Any = None,
    query_len: Any = 1, cu_query_lens: Any = None, kv_start: Any = None, kv_end: Any = None, sinks: Any = None,
    softcap: Any = None, k_scale: Any = None, v_scale: Any = None, layer: Any = None, return_lse: bool = False,
    out_dtype: Any = None, plan: Plan | SplitsAndPack | None = None, backend: str | None = None,
    batch_invariant: bool = False, validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """Check and run; ``plan`` is a ``Plan``, a ``SplitsAndPack`` or None."""
    for name, value in (
        ("window", window), ("return_lse", return_lse), ("batch_invariant", batch_invariant), ("validate", validate)
    ):  # fmt: skip
        check_static(name, value)
    window = check_window(window)
    check_query_and_cache(query, cache)
    query_len = check_rows(
        query, block_table, seq_lens,
        query_len=query_len, cu_query_lens=cu_query_lens, kv_start=kv_start, kv_end=kv_end,
    )  # fmt: skip
    check_head_options(query.shape[0], query.shape[1], gate, sinks)
    scale_array, scale_number = (None, cache.k_dim**-0.5) if scale is None else check_scalar("scale", scale)
    softcap_array, softcap_number = None, None
    if isinstance(softcap, (jax.Array, np.ndarray)):
        softcap_array, _ = check_scalar("softcap", softcap)
    else:
        softcap_number = check_softcap(softcap)
    k_array, k_number = check_scale("k_scale", k_scale, cache)
    v_array, v_number = check_scale("v_scale", v_scale, cache)
    layer_array, layer_number = check_layer(layer, cache)
    window = window if window is None else min(window, MAX_POSITIONS)
    problem = problem_of(
        query, cache, block_table, window=window, query_len=query_len, ragged=cu_query_lens is not None
    )
    chosen = route(problem, plan, backend, batch_invariant)
    statics = Statics(
        cache.layout, cache.k_dim, cache.v_dim, cache.pages,
        k_scale=k_number, v_scale=v_number, layer=layer_number, max_blocks=int(block_table.shape[1]),
        scale=scale_number, softcap=softcap_number, out_dtype=check_out_dtype(out_dtype, query.dtype),
        return_lse=bool(return_lse),
    )  # fmt: skip
    arrays = (query, cache.bases, block_table, seq_lens, cu_query_lens, kv_start, kv_end, k_array, v_array, sinks, gate)
    operands = Operands(*arrays, scale_array, softcap_array, layer_array)
    if validate:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands)):
            raise ValueError(
                "validate must be False while JAX traces, because it reads the data; call check_inputs(...) before, "
                "got validate=True"
            )
        check_inputs(
            cache, block_table, seq_lens, window=window, query_len=query_len, cu_query_lens=cu_query_lens,
            kv_start=kv_start, kv_end=kv_end, tokens=query.shape[0],
        )  # fmt: skip
    out, lse = _run.decode(as_arrays(operands), statics=statics, route=chosen)
    if lse is None:
        return out
    return out, lse
