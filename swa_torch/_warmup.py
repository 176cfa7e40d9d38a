"""Compile a plan's kernels now, so that nothing compiles while serving."""

from __future__ import annotations

from typing import Any

import torch

from swa_plan import Plan
from swa_torch._api import swa_decode
from swa_torch._append import append
from swa_torch._cache import Cache, as_paged_cache


def warmup(
    plan: Plan,
    query: torch.Tensor,
    cache: Cache,
    *,
    index_dtype: torch.dtype = torch.int32,
    layer: int | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Compile (or load from Triton's cache) every kernel that calls with this plan will launch.

    Runs one request without keys through ``swa_decode``: nothing of the cache is read and only a temporary is
    written. What is compiled depends on the plan, dtypes, the strides of query, cache and output, and on which
    options are present; not on batch size, table width or lengths.

    Args:
        plan: the plan that calls will pass.
        query: a tensor with the calls' heads, dtype and strides, such as their query buffer.
        cache: the cache of the calls.
        index_dtype: dtype of their tables and lengths.
        layer: any layer, where the cache has layers.
        key: with ``value``, also compiles ``append`` for rows like these.
        value: see ``key``.
        options: the options that calls will pass, such as ``gate=``, ``sinks=``, ``softcap=``, ``k_scale=``,
            ``return_lse=``, ``out_dtype=``; tensors count by dtype and strides. ``cu_query_lens``, ``kv_start`` and
            ``kv_end`` are replaced by fitting ones; an ``out=`` counts by its strides and stays untouched.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``swa_decode``.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, got {type(plan).__name__}")
    problem = plan.problem
    rows = problem.query_len
    device = query.device
    paged = as_paged_cache(cache)
    layer = 0 if paged.layout.has_layers and layer is None else layer
    table = torch.zeros(1, problem.max_blocks, dtype=index_dtype, device=device)
    nothing = torch.zeros(1, dtype=index_dtype, device=device)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` rows with the strides of ``tensor``, in memory of its own."""
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip((rows, *tensor.shape[1:]), tensor.stride(), strict=True)
        )
        flat = torch.zeros(reach, dtype=tensor.dtype, device=device)
        return flat.as_strided((rows, *tensor.shape[1:]), tensor.stride())

    if problem.ragged:
        edges_dtype = options["cu_query_lens"].dtype if options.get("cu_query_lens") is not None else torch.int32
        options["cu_query_lens"] = torch.tensor([0, rows], dtype=edges_dtype, device=device)
    for name in ("kv_start", "kv_end"):
        if options.get(name) is not None:
            options[name] = torch.zeros(1, dtype=options[name].dtype, device=device)
    for name in ("gate", "out"):
        if options.get(name) is not None:
            options[name] = like(options[name])
    swa_decode(
        like(query), paged, table, nothing, window=problem.window, query_len=rows, plan=plan, layer=layer, **options
    )
    if key is not None and value is not None:
        scales = {name: options[name] for name in ("k_scale", "v_scale") if options.get(name) is not None}
        skipped = torch.full((1,), -1, dtype=index_dtype, device=device)
        append(paged, key[:1], value[:1], skipped, layer=layer, **scales)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
