"""From arrays to a ``Problem`` and to the plans that a call may run. Only shapes and dtypes are looked at."""

from __future__ import annotations

from typing import Any, NamedTuple

from swa_pallas._cache import Cache, PagedCache, as_paged_cache
from swa_pallas._device import BACKENDS, check_backend, has_pallas_triton, lowering_profile, runs_on_gpu
from swa_pallas._validate import check_block_table, check_query_and_cache
from swa_plan import DeviceProfile, Plan, Problem
from swa_plan._chosen import SplitsAndPack, cached_plan, check_chosen, check_fits, plan_from_splits

CPU = DeviceProfile.named("cpu")
DEPENDENT_LAUNCH = False
"""XLA has none (jax 0.11.2; ``--xla_gpu_enable_pdl`` changes nothing for these kernels)."""


class Route(NamedTuple):
    """The plans of a call by where it lowers: ``cuda`` for CUDA devices, ``other`` elsewhere.

    ``backend`` is the one that the caller (or the plan) fixed; then both plans are the same. A ``cuda`` of None means
    that nothing is known of the device: lowering for CUDA is an error that says how to plan.
    """

    backend: str | None
    cuda: Plan | None
    other: Plan


def problem_of(
    query: Any, cache: PagedCache, block_table: Any, *, window: int | None, query_len: int, ragged: bool,
    max_requests: int | None = None,
) -> Problem:  # fmt: skip
    """Return the problem that a call with these arrays poses."""
    requests, tokens = int(block_table.shape[0]), int(query.shape[0])
    most = requests if max_requests is None else max_requests
    return Problem(
        max_requests=most,
        heads=int(query.shape[1]),
        kv_heads=cache.kv_heads,
        k_dim=cache.k_dim,
        v_dim=cache.v_dim,
        window=window,
        block=cache.block,
        max_blocks=int(block_table.shape[1]),
        query_len=query_len,
        dtype=query.dtype.name,
        cache_dtype=cache.dtype.name,
        ragged=ragged,
        max_tokens=max(tokens, most * query_len) if ragged else None,
    )


def route(problem: Problem, plan: Plan | SplitsAndPack | None, backend: str | None, batch_invariant: bool) -> Route:
    """Return the plans that a call may run: the caller's, checked, or the planner's.

    Raises:
        TypeError: ``plan`` is no plan.
        ValueError: the plan was made for another problem or conflicts with ``backend`` or ``batch_invariant``, or a
            GPU backend is asked for and no GPU is known.
        RuntimeError: the backend needs a part of JAX that is gone.
    """
    check_backend(backend)
    if isinstance(plan, Plan) or not (plan is None or isinstance(plan, SplitsAndPack)):
        check_chosen(plan, problem, backend=backend, backends=BACKENDS, batch_invariant=batch_invariant)
        assert isinstance(plan, Plan)
        fixed = {kernel: name for name, kernel in BACKENDS.items()}[plan.kernel]
        check_backend(fixed)
        if plan.kernel == "portable" and (profile := lowering_profile()) is not None:
            check_fits(plan, profile)
        return Route(fixed, plan, plan)
    if isinstance(plan, SplitsAndPack):

        def planned(kernel: str, profile: DeviceProfile | None) -> Plan:
            return plan_from_splits(problem, plan, kernel, profile)
    else:

        def planned(kernel: str, profile: DeviceProfile | None) -> Plan:
            return _planned(problem, profile or CPU, kernel, batch_invariant)

    if backend in ("xla", "interpret"):
        only = planned(BACKENDS[backend], None)
        return Route(backend, only, only)
    profile = lowering_profile() if has_pallas_triton() else None
    portable = planned("portable", profile) if profile is not None or isinstance(plan, SplitsAndPack) else None
    if backend == "pallas_triton":
        if portable is None:
            raise ValueError(
                "backend 'pallas_triton' must know its GPU: pass plan=plan_for(..., device=DeviceProfile.named(...)) "
                "where this process has none, got no CUDA device"
            )
        return Route(backend, portable, portable)
    return Route(None, portable, planned("ops", None))


def _planned(problem: Problem, profile: DeviceProfile, kernel: str | None, batch_invariant: bool) -> Plan:
    """Return the planner's plan for kernels that XLA launches: each waits for the one before."""
    return cached_plan(
        problem, profile, kernel=kernel, batch_invariant=batch_invariant, dependent_launch=DEPENDENT_LAUNCH
    )


def plan_for(
    query: Any,
    cache: Cache,
    block_table: Any,
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
    """Return a plan for calls with arrays like these (concrete, traced or ``ShapeDtypeStruct``; no data is read).

    A plan fixes the backend that runs it. Without ``device`` and ``backend`` it is planned for this process's GPU, or
    for ``xla`` where there is none.

    Args:
        query: ``[tokens, heads, k_dim]``.
        cache: a ``PagedCache`` or ``(key_cache, value_cache)``.
        block_table: ``[requests, max_blocks]``; narrower tables are served by the same plan.
        window: keys a row sees, its own included; None for full causal attention.
        query_len: rows of each request, or their upper bound.
        ragged: whether calls will pass ``cu_query_lens``.
        layer: any layer, where the cache has layers; all are alike, so it is ignored.
        max_requests: most requests of a call; None means as many as ``block_table`` has rows.
        batch_invariant: see ``swa_decode``.
        backend: ``pallas_triton``, ``xla`` or ``interpret``.
        device: profile to plan for, such as ``DeviceProfile.named("h200")`` to export from a machine without a GPU.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape or choice does not fit.
        RuntimeError: the backend needs a part of JAX that is gone.
    """
    paged = as_paged_cache(cache)
    check_query_and_cache(query, paged)
    check_block_table(block_table)
    problem = problem_of(
        query, paged, block_table, window=window, query_len=query_len, ragged=ragged, max_requests=max_requests
    )
    if device is not None:
        check_backend(backend)
        kernel = None if backend is None else BACKENDS[backend]
        return _planned(problem, device, kernel, batch_invariant)
    chosen = route(problem, None, backend, batch_invariant)
    return chosen.cuda if chosen.cuda is not None and (backend is not None or runs_on_gpu()) else chosen.other
