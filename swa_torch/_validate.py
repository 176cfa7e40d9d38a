"""Checks of everything a caller passes, before anything is written.

Each error names the argument, the rule and the value. Sizes may be symbolic (a traced call), so sizes that vary between
calls are only compared, never converted.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swa_plan._checks import check_head_dim, check_heads, check_integer, check_real

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
INDEX_DTYPES = (torch.int32, torch.int64)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return dtypes as a comma-separated list."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], shape: tuple | None = None, *, like: torch.Tensor,
    unit_stride: bool = True,
) -> None:  # fmt: skip
    """Check one tensor's kind, dtype, device, shape and last stride.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: another device than ``like``, another shape, or a last stride other than 1.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {names(dtypes)}, got {names((tensor.dtype,))}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the query's device {like.device}, got {tensor.device}")
    if shape is not None and (
        tensor.ndim != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True))
    ):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if unit_stride and tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(
            f"{name} must have stride 1 in dim {tensor.ndim - 1} (its last), got strides {list(tensor.stride())}"
        )


def check_no_gradients(**tensors: object) -> None:
    """Refuse tensors that want gradients: decode attention is for inference.

    Raises:
        NotImplementedError: grad mode is on and a tensor requires gradients.
    """
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise NotImplementedError(
                    f"gradients are not implemented, got {name} with requires_grad=True; use torch.no_grad()"
                )


def check_query_and_cache(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Check query and cache against each other.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: devices, shapes or strides.
    """
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query must be a torch tensor, got {type(query).__name__}")
    check_tensor("query", query, QUERY_DTYPES, like=query)
    if query.ndim != 3:
        raise ValueError(f"query must have 3 dims [tokens, heads, k_dim], got shape {list(query.shape)}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not isinstance(cache, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(cache).__name__}")
        if cache.dtype == torch.uint8:
            raise TypeError(
                f"{name} has dtype uint8, whose meaning is not known: pass {name}.view(torch.float8_e4m3fn), "
                ".view(torch.float8_e5m2) or .view(torch.int8)"
            )
        if cache.dtype != query.dtype and cache.dtype not in QUANTISED_DTYPES:
            raise TypeError(
                f"{name} must have the query's dtype {names((query.dtype,))} or one of {names(QUANTISED_DTYPES)}, "
                f"got {names((cache.dtype,))}"
            )
        if cache.ndim != 4:
            raise ValueError(f"{name} must have 4 dims [pages, block, kv_heads, dim], got shape {list(cache.shape)}")
        check_tensor(name, cache, (cache.dtype,), like=query)
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(
            f"value_cache must have key_cache's dtype {names((key_cache.dtype,))}, got {names((value_cache.dtype,))}"
        )
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"value_cache must agree with key_cache in [pages, block, kv_heads] = {list(key_cache.shape[:3])}, "
            f"got {list(value_cache.shape[:3])}"
        )
    check_integer("block", int(key_cache.shape[1]), minimum=1)
    check_heads(int(query.shape[1]), int(key_cache.shape[2]))
    check_head_dim("k_dim", int(query.shape[2]))
    check_head_dim("v_dim", int(value_cache.shape[3]))
    if query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"key_cache must have the query's head size {query.shape[2]}, got {key_cache.shape[3]}")


def check_scale(
    name: str, scale: object, cache: torch.Tensor, *, like: torch.Tensor
) -> tuple[torch.Tensor | None, float]:
    """Return a dequantisation scale as ``(tensor or None, number)``; their product is what is meant.

    Raises:
        TypeError: neither a number nor an fp32 tensor.
        ValueError: a quantised cache has none, or the shape is neither ``[]`` nor ``[kv_heads]``.
    """
    if scale is None:
        if cache.dtype in QUANTISED_DTYPES:
            raise ValueError(f"{name} must be given for a quantised cache ({names((cache.dtype,))}), got None")
        return None, 1.0
    if isinstance(scale, torch.Tensor):
        kv_heads = cache.shape[2]
        check_tensor(name, scale, (torch.float32,), like=like)
        if scale.ndim not in (0, 1) or (scale.ndim == 1 and scale.shape[0] != kv_heads):
            raise ValueError(f"{name} must be a scalar or have shape [{kv_heads}] (kv_heads), got {list(scale.shape)}")
        return scale, 1.0
    return None, check_real(name, scale)


def check_block_table(block_table: torch.Tensor, *, like: torch.Tensor, unit_stride: bool = True) -> None:
    """Check a block table by itself.

    Raises:
        TypeError: kind or dtype.
        ValueError: device, rank or last stride.
    """
    check_tensor("block_table", block_table, INDEX_DTYPES, like=like, unit_stride=unit_stride)
    if block_table.ndim != 2:
        raise ValueError(f"block_table must have 2 dims [requests, max_blocks], got shape {list(block_table.shape)}")


def check_rows(
    query: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_len: object,
    cu_query_lens: torch.Tensor | None,
    kv_start: torch.Tensor | None,
    kv_end: torch.Tensor | None,
) -> int:
    """Check how rows belong to requests; return ``query_len``.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, or tokens that do not divide.
    """
    rows = check_integer("query_len", query_len, minimum=1)
    check_block_table(block_table, like=query)
    requests, tokens = block_table.shape[0], query.shape[0]
    check_tensor("seq_lens", seq_lens, INDEX_DTYPES, (requests,), like=query)
    if cu_query_lens is not None:
        check_tensor("cu_query_lens", cu_query_lens, INDEX_DTYPES, (requests + 1,), like=query)
    elif tokens != requests * rows:
        raise ValueError(
            f"query must have requests * query_len = {requests} * {rows} tokens (or pass cu_query_lens), got {tokens}"
        )
    for name, bound in (("kv_start", kv_start), ("kv_end", kv_end)):
        if bound is not None:
            check_tensor(name, bound, INDEX_DTYPES, (requests,), like=query)
    return rows


def check_head_options(query: torch.Tensor, gate: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    """Check gate and sinks.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes or devices.
    """
    tokens, heads = query.shape[0], query.shape[1]
    if gate is not None:
        check_tensor("gate", gate, QUERY_DTYPES, (tokens, heads), like=query, unit_stride=False)
    if sinks is not None:
        check_tensor("sinks", sinks, QUERY_DTYPES, (heads,), like=query)


def check_out(
    out: torch.Tensor, shape: tuple, out_dtype: torch.dtype, *, like: torch.Tensor, name: str = "out"
) -> None:
    """Check an output that the caller allocated.

    Raises:
        TypeError: dtype.
        ValueError: shape, strides, device, or overlap with itself.
    """
    check_tensor(name, out, (out_dtype,), shape, like=like)
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{name} must not overlap itself, got strides {list(out.stride())}")
            reach += (size - 1) * stride


def check_no_overlap(out: torch.Tensor, tensors: dict[str, object], *, name: str = "out") -> None:
    """Check that an output shares no byte with any of a call's other tensors.

    Raises:
        ValueError: naming the tensor that it overlaps.
    """
    if out.is_meta or isinstance(out, FakeTensor):
        return
    stop = _byte_range(out)[1]
    for other, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() >= stop:
            continue  # most tensors are told apart by their first byte alone
        if tensors_overlap(out, tensor):
            raise ValueError(f"{name} must not overlap an input, got an overlap with {other}")


def tensors_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share a byte. Column slices of one matrix (equal row strides) are told apart."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    (a_start, a_stop), (b_start, b_stop) = _byte_range(a), _byte_range(b)
    if a_stop <= b_start or b_stop <= a_start:
        return False
    row = a.stride(0) * a.element_size()
    if a.ndim and b.ndim and row and row == b.stride(0) * b.element_size():
        (a_left, a_right), (b_left, b_right) = _byte_range(a[0]), _byte_range(b[0])
        shift = (b_left - a_left) % row
        if a_right - a_left <= shift and shift + (b_right - b_left) <= row:
            return False
    return True


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def check_workspace(workspace: torch.Tensor, needed: int, *, like: torch.Tensor, alignment: int = 256) -> None:
    """Check scratch memory that the caller allocated.

    Raises:
        TypeError: dtype.
        ValueError: size, alignment, strides or device.
    """
    check_tensor("workspace", workspace, (torch.uint8,), like=like)
    if workspace.ndim != 1 or not workspace.is_contiguous():
        raise ValueError(f"workspace must be contiguous and 1-dimensional, got shape {list(workspace.shape)}")
    if workspace.numel() < needed:
        raise ValueError(f"workspace must have at least plan.workspace_bytes = {needed} bytes, got {workspace.numel()}")
    check_alignment(workspace, alignment)


def check_alignment(workspace: torch.Tensor, alignment: int = 256) -> None:
    """Check where scratch memory begins.

    Raises:
        ValueError: naming the address.
    """
    if workspace.numel() and workspace.data_ptr() % alignment:
        raise ValueError(f"workspace must be {alignment}-byte aligned, got address {workspace.data_ptr():#x}")


def check_out_dtype(out_dtype: object, query: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """Return the output's dtype: ``out_dtype``, else that of ``out``, else the query's.

    Raises:
        TypeError: not one of the query dtypes, or ``out`` is not a tensor.
    """
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch tensor, got {type(out).__name__}")
    if out_dtype is None:
        out_dtype = query.dtype if out is None else out.dtype
    if out_dtype not in QUERY_DTYPES:
        raise TypeError(f"out_dtype must be one of {names(QUERY_DTYPES)}, got {out_dtype}")
    assert isinstance(out_dtype, torch.dtype)
    return out_dtype
