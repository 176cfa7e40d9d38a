"""From tensors to a ``Problem`` and a ``Plan``. Only shapes, dtypes and the device are looked at, never device data."""

from __future__ import annotations

import functools

import torch

from swa_plan import DeviceProfile, Plan, Problem
from swa_plan._chosen import (
    REMEMBERED_PLANS,
    SplitsAndPack,
    cached_plan,
    check_chosen,
    check_fits,
    plan_from_splits,
)
from swa_torch._cache import Cache, as_paged_cache
from swa_torch._device import BACKENDS, choose_kernel, device_profile

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
}

parse_plan = functools.lru_cache(maxsize=REMEMBERED_PLANS)(Plan.from_json)


def problem_of(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    window: int | None,
    query_len: int,
    ragged: bool,
    max_requests: int | None = None,
) -> Problem:
    """Return the problem that a call with these tensors poses."""
    requests, tokens = int(block_table.shape[0]), int(query.shape[0])
    most = requests if max_requests is None else max_requests
    return Problem(
        max_requests=most,
        heads=int(query.shape[1]),
        kv_heads=int(key_cache.shape[2]),
        k_dim=int(key_cache.shape[3]),
        v_dim=int(value_cache.shape[3]),
        window=window,
        block=int(key_cache.shape[1]),
        max_blocks=int(block_table.shape[1]),
        query_len=query_len,
        dtype=DTYPE_NAMES[query.dtype],
        cache_dtype=DTYPE_NAMES[key_cache.dtype],
        ragged=ragged,
        max_tokens=max(tokens, most * query_len) if ragged else None,
    )


def resolve_plan(
    problem: Problem,
    device: torch.device,
    plan: Plan | SplitsAndPack | None,
    backend: str | None,
    batch_invariant: bool,
) -> Plan:
    """Return the plan that a call runs: the caller's, checked, one with the caller's splits and pack, or the planner's.

    Raises:
        ValueError: the plan was made for another problem, or conflicts with ``backend`` or ``batch_invariant``.
    """
    if plan is None:
        return cached_plan(
            problem, device_profile(device), kernel=choose_kernel(device, backend), batch_invariant=batch_invariant
        )
    if isinstance(plan, SplitsAndPack):
        return plan_from_splits(problem, plan, choose_kernel(device, backend), device_profile(device))
    check_chosen(plan, problem, backend=backend, backends=BACKENDS, batch_invariant=batch_invariant)
    choose_kernel(device, {kernel: name for name, kernel in BACKENDS.items()}[plan.kernel])
    check_fits(plan, device_profile(device))
    return plan


def plan_for(
    query: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    *,
    window: int | None,
    query_len: int = 1,
    ragged: bool = False,
    layer: int | None = None,
    max_requests: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    device: DeviceProfile | None = None,
) -> Plan:
    """Return a plan for calls with tensors like these (real, fake or on the meta device; no data is read).

    Args:
        query: ``[tokens, heads, k_dim]``.
        cache: a ``PagedCache`` or ``(key_cache, value_cache)``.
        block_table: ``[requests, max_blocks]``; narrower tables are served by the same plan.
        window: keys a row sees, its own included; None for full causal attention.
        query_len: rows of each request, or their upper bound.
        ragged: whether calls will pass ``cu_query_lens``.
        layer: any layer, where the cache has layers; all are alike.
        max_requests: most requests of a call; None means as many as ``block_table`` has rows.
        batch_invariant: see ``swa_decode``.
        backend: ``triton``, ``gluon``, ``cpu`` or ``interpret``; None takes the device's own.
        device: profile to plan for instead of the tensors' device.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape or choice does not fit.
    """
    from swa_torch._validate import check_block_table, check_query_and_cache

    paged = as_paged_cache(cache)
    key_cache, value_cache = paged.views(0 if paged.layout.has_layers and layer is None else layer)
    check_query_and_cache(query, key_cache, value_cache)
    check_block_table(block_table, like=query)
    problem = problem_of(
        query, key_cache, value_cache, block_table,
        window=window, query_len=query_len, ragged=ragged, max_requests=max_requests,
    )  # fmt: skip
    if device is not None:
        kernel = None if backend is None else BACKENDS.get(backend, backend)
        return cached_plan(problem, device, kernel=kernel, batch_invariant=batch_invariant)
    return resolve_plan(problem, query.device, None, backend, batch_invariant)
