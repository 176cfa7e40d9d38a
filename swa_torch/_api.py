"""The public decode calls: check everything, then hand one operator checked tensors."""

from __future__ import annotations

import torch

from swa_plan import Plan
from swa_plan._checks import check_integer
from swa_plan._chosen import SplitsAndPack
from swa_torch import _op  # noqa: F401  (defines the operators)
from swa_torch._cache import Cache, cache_views
from swa_torch._call import DecodeCall
from swa_torch._device import is_capturing
from swa_torch._inputs import check_inputs
from swa_torch._planning import parse_plan
from swa_torch._repeat import key_of, remember, run_again
from swa_torch._resolve import Options, Tensors, check_memory, resolve, resolve_traced


def swa_decode(
    query: torch.Tensor,
    cache: Cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int | None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    query_len: int = 1,
    cu_query_lens: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    kv_end: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    layer: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    plan: Plan | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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

    Args:
        query: ``[tokens, heads, k_dim]``, bf16, fp16 or fp32; any strides with a last stride of 1.
        cache: a ``PagedCache``, or ``(key_cache, value_cache)``, each ``[pages, block, kv_heads, dim]``.
        block_table: ``[requests, max_blocks]``, int32 or int64: page of each ``block`` positions of a request.
        seq_lens: ``[requests]``, int32 or int64: keys of each request, its newest query rows included; negative
            counts as 0.
        window: keys a row sees, its own position included; None for full causal attention.
        gate: ``[tokens, heads]`` logits of a sigmoid gate, any strides.
        scale: factor of the logits; None means ``k_dim ** -0.5``.
        query_len: rows of each request, or their upper bound with ``cu_query_lens``.
        cu_query_lens: ``[requests + 1]``, cumulative rows on the device, never read by the host. Rows at or after the
            last are padding; a request with more rows than ``query_len`` gets NaN rows.
        kv_start: ``[requests]``: only keys at positions ``>= kv_start`` are visible.
        kv_end: ``[requests]``: only keys at positions ``< kv_end`` are visible.
        sinks: ``[heads]``: one extra logit per head in the denominator, never capped or scaled.
        softcap: positive cap of the logits.
        k_scale: a stored key means ``stored * k_scale``; a number, or fp32 of shape ``[]`` or ``[kv_heads]`` read on
            the device. Required for quantised caches (fp8 e4m3fn/e5m2, int8).
        v_scale: the same for values.
        layer: layer of a cache with a ``layers`` axis.
        return_lse: whether to return the LSE too.
        out_dtype: output dtype; None means the query's.
        out: ``[tokens, heads, v_dim]`` to write into, overlapping no input.
        workspace: at least ``plan.workspace_bytes`` of uint8, 256-byte aligned, free again once the call has run.
        plan: a plan from ``plan_for``; None plans from the shapes.
        backend: ``triton`` (CUDA), ``gluon`` (sm_90; what its kernel does not take runs on Triton's), ``cpu`` or
            ``interpret``; None takes the device's own.
        batch_invariant: make each request's bits independent of batch size, neighbours, position, padding and
            ``query_len``.
        validate: check the data too (synchronises); not while compiling or capturing.

    Returns:
        ``out``, or ``(out, lse)`` with ``lse`` fp32 ``[tokens, heads]``: natural-log log-sum-exp of the logits after
        scale and softcap, sinks included, before the gate.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, ranges, strides, devices, a plan for another problem, or invalid data with ``validate``.
        NotImplementedError: an input requires gradients, or the hardware is not supported.
        RuntimeError: Triton is needed and missing.
    """
    key_cache, value_cache = cache_views(cache, layer)
    return _decode(
        query, key_cache, value_cache, block_table, seq_lens, window, gate, scale, query_len, cu_query_lens, kv_start,
        kv_end, sinks, softcap, k_scale, v_scale, return_lse, out_dtype, out, workspace, plan, backend, batch_invariant,
        validate,
    )  # fmt: skip


def swa_decode_gated(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gate: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int,
    query_len: int,
    splits: int,
    pack: int = 1,
) -> None:
    """Gated decode with the original kernel's signature: splits and packing are the caller's, ``output`` is written.

    Args:
        query: ``[tokens, heads, k_dim]``, ``tokens == requests * query_len``.
        key_cache: ``[pages, block, kv_heads, k_dim]`` view.
        value_cache: ``[pages, block, kv_heads, v_dim]`` view.
        block_table: ``[requests, max_blocks]``, int32 or int64.
        seq_lens: ``[requests]``, int32 or int64, the query rows included.
        gate: ``[tokens, heads]`` logits.
        output: ``[tokens, heads, v_dim]`` in the query's dtype.
        scale: factor of the logits.
        window: keys a row sees, its own included.
        query_len: rows of each request, a multiple of ``pack``.
        splits: chunks of the window, at least 1; see ``swa_decode_plan``.
        pack: rows that one program takes, ``pack * group <= 64`` (1: any group).

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``swa_decode``.
    """
    splits, pack = _count("splits", splits), _count("pack", pack)
    for name, tensor in (("gate", gate), ("output", output)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    _decode(
        query, key_cache, value_cache, block_table, seq_lens, window, gate, scale, query_len, out=output,
        plan=SplitsAndPack(splits, pack),
        out_dtype=query.dtype if isinstance(query, torch.Tensor) else None,
    )  # fmt: skip


def _decode(
    query, key_cache, value_cache, block_table, seq_lens, window, gate, scale=None, query_len=1, cu_query_lens=None,
    kv_start=None, kv_end=None, sinks=None, softcap=None, k_scale=None, v_scale=None, return_lse=False, out_dtype=None,
    out=None, workspace=None, plan=None, backend=None, batch_invariant=False, validate=False,
):  # fmt: skip
    """Check and run; ``plan`` is a ``Plan``, a ``SplitsAndPack`` or None.

    While ``torch.compile`` traces, the operator's fake kernel checks the shapes instead, and the operator plans for the
    sizes of the run.
    """
    traced = torch.compiler.is_compiling()
    k_tensor = k_scale if k_scale is not None and isinstance(k_scale, torch.Tensor) else None
    v_tensor = v_scale if v_scale is not None and isinstance(v_scale, torch.Tensor) else None
    given = (
        query, key_cache, value_cache, block_table, seq_lens, gate, cu_query_lens, kv_start, kv_end, sinks, k_tensor,
        v_tensor, out, workspace,
    )  # fmt: skip
    key = None
    if not (traced or validate):
        key = key_of(
            given,
            (
                window, type(window), query_len, type(query_len), scale, type(scale), softcap, type(softcap), out_dtype,
                plan.text if type(plan) is Plan else plan, type(plan), backend, batch_invariant, return_lse,
                None if k_scale is k_tensor else _exactly(k_scale),
                None if v_scale is v_tensor else _exactly(v_scale),
            ),
        )  # fmt: skip
        done = None if key is None else run_again(key, given)
        if done is not None:
            return done if return_lse else done[0]
    tensors = Tensors(*given)._replace(k_scale=k_scale, v_scale=v_scale)
    options = Options(window, query_len, scale, softcap, out_dtype, plan, backend, batch_invariant)
    resolved = resolve_traced(tensors, options) if traced else resolve(tensors, options)
    if validate and (traced or is_capturing(query.device)):
        raise ValueError(
            "validate must be False while compiling or capturing a graph, because it reads device data; "
            "call check_inputs(...) before, got validate=True"
        )
    if not traced:
        check_memory(tensors, options)
        if validate:
            check_inputs(
                (key_cache, value_cache), block_table, seq_lens, window=window, query_len=query_len,
                cu_query_lens=cu_query_lens, kv_start=kv_start, kv_end=kv_end, tokens=query.shape[0],
            )  # fmt: skip
    output = query.new_empty(resolved.shape, dtype=resolved.dtype) if out is None else out
    numbers = (
        resolved.scale, resolved.k_number, resolved.v_number, resolved.softcap, resolved.window, resolved.query_len,
        resolved.plan_text, backend, batch_invariant, return_lse,
    )  # fmt: skip
    if workspace is None:
        lse = torch.ops.swa_torch.decode(*given[:12], *numbers, output)
    else:
        lse = torch.ops.swa_torch.decode_with_workspace(*given[:12], *numbers, output, workspace)
    if key is not None:
        call = DecodeCall(
            *given[:12], resolved.scale, resolved.k_number, resolved.v_number, resolved.softcap, output,
            lse if return_lse else None, workspace, parse_plan(resolved.plan_text),
        )  # fmt: skip
        remember(key, given, call)
    return (output, lse) if return_lse else output


def _count(name: str, number: object) -> int:
    """Return a number of at least 1; a plain int is spared the question what else is an integer."""
    return int(number) if type(number) is int and number > 0 else check_integer(name, number, minimum=1)


def _exactly(number: object) -> tuple[object, type]:
    """Return what tells a number from all that compare equal to it."""
    return (number, float) if type(number) is float and number else (repr(number), type(number))
