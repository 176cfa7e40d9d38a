"""What the shapes, strides, dtypes and options of a call decide: whether it is legal, its plan and its plain numbers.

All of that is the same from step to step, so it is found once and remembered; only what depends on addresses is checked
at every call. While ``torch.compile`` traces, sizes may be symbolic and the operator's fake kernel checks them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from swa_plan import Plan
from swa_plan._checks import check_integer, check_real, check_softcap, check_window
from swa_plan._chosen import SplitsAndPack
from swa_plan._problem import MAX_POSITIONS
from swa_torch import _op
from swa_torch._device import refuse_interpreted_bfloat16
from swa_torch._planning import problem_of, resolve_plan
from swa_torch._validate import (
    check_alignment,
    check_head_options,
    check_no_gradients,
    check_no_overlap,
    check_out,
    check_out_dtype,
    check_query_and_cache,
    check_rows,
    check_scale,
    check_tensor,
    check_workspace,
)

REMEMBERED_CALLS = 4096


class Tensors(NamedTuple):
    """The tensors of a call, as the caller passed them (scales may be numbers)."""

    query: Any
    key_cache: Any
    value_cache: Any
    block_table: Any
    seq_lens: Any
    gate: Any
    cu_query_lens: Any
    kv_start: Any
    kv_end: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    out: Any
    workspace: Any


class Options(NamedTuple):
    """The other arguments of a call; ``plan`` is a ``Plan``, a ``SplitsAndPack`` or None."""

    window: Any
    query_len: Any
    scale: Any
    softcap: Any
    out_dtype: Any
    plan: Any
    backend: Any
    batch_invariant: Any


class Resolved(NamedTuple):
    """A legal call's numbers, output and plan (as the operator takes it)."""

    window: int | None
    query_len: int
    scale: float
    k_number: float
    v_number: float
    softcap: float | None
    shape: tuple
    dtype: torch.dtype
    plan_text: str


_remembered: dict[tuple, Resolved] = {}


def resolve(tensors: Tensors, options: Options) -> Resolved:
    """Check a call by everything but its data and addresses, and plan it.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``swa_decode``.
    """
    try:
        key = (torch.is_grad_enabled(), *map(_signature, tensors), *options, *map(type, options))
        found = _remembered.get(key)
    except TypeError:  # symbolic sizes, or an argument that cannot be hashed and is refused below
        return _resolve(tensors, options)
    if found is None:
        found = _resolve(tensors, options)
        if len(_remembered) >= REMEMBERED_CALLS:
            _remembered.clear()
        _remembered[key] = found
    return found


def resolve_traced(tensors: Tensors, options: Options) -> Resolved:
    """Check what is constant while ``torch.compile`` traces; the operator checks the rest and plans at run time."""
    check_query_and_cache(tensors.query, tensors.key_cache, tensors.value_cache)
    numbers = _numbers(tensors, options)
    if tensors.out is not None:
        name = _output_name(options)
        check_tensor(name, tensors.out, (numbers.dtype,), numbers.shape, like=tensors.query)
        if tensors.out is tensors.query or tensors.out is tensors.gate:
            raise ValueError(f"{name} must not overlap an input, got the same tensor as query or gate")
    plan = options.plan
    text = "" if plan is None else _op.UNCHECKED + plan.text if isinstance(plan, Plan) else f"{plan.splits} {plan.pack}"
    return numbers._replace(plan_text=text)


def _output_name(options: Options) -> str:
    """Return what the caller calls the output."""
    return "output" if isinstance(options.plan, SplitsAndPack) else "out"


def check_memory(tensors: Tensors, options: Options) -> None:
    """Check what depends on addresses: the output overlaps no input, and the workspace is aligned.

    Raises:
        ValueError: naming the overlap or the address.
    """
    others = tensors._asdict()
    out, workspace = others.pop("out"), others.pop("workspace")
    if workspace is not None:
        check_no_overlap(workspace, others, name="workspace")
        check_alignment(workspace)
    if out is not None:
        check_no_overlap(out, {**others, "workspace": workspace}, name=_output_name(options))


def _resolve(tensors: Tensors, options: Options) -> Resolved:
    query = tensors.query
    check_query_and_cache(query, tensors.key_cache, tensors.value_cache)
    check_rows(
        query, tensors.block_table, tensors.seq_lens,
        query_len=options.query_len, cu_query_lens=tensors.cu_query_lens, kv_start=tensors.kv_start,
        kv_end=tensors.kv_end,
    )  # fmt: skip
    check_head_options(query, tensors.gate, tensors.sinks)
    numbers = _numbers(tensors, options)
    problem = problem_of(
        query, tensors.key_cache, tensors.value_cache, tensors.block_table,
        window=numbers.window, query_len=numbers.query_len, ragged=tensors.cu_query_lens is not None,
    )  # fmt: skip
    plan = resolve_plan(problem, query.device, options.plan, options.backend, options.batch_invariant)
    if plan.kernel == "interpret":
        refuse_interpreted_bfloat16(query=query, gate=tensors.gate, out=query.new_empty(0, dtype=numbers.dtype))
    if tensors.workspace is not None:
        check_workspace(tensors.workspace, plan.workspace_layout(query.shape[0])[1], like=query)
    if tensors.out is not None:
        check_out(tensors.out, numbers.shape, numbers.dtype, like=query, name=_output_name(options))
    return numbers._replace(plan_text=plan.text)


def _numbers(tensors: Tensors, options: Options) -> Resolved:
    """Check the arguments that are the same whether or not a call is traced; the plan is left open."""
    grads = {name: tensor for name, tensor in tensors._asdict().items() if tensor is not None}
    check_no_gradients(**grads)
    window = check_window(options.window)
    query, value_cache = tensors.query, tensors.value_cache
    if options.plan is not None and not isinstance(options.plan, (Plan, SplitsAndPack)):
        raise TypeError(f"plan must be a Plan or None, got {type(options.plan).__name__}")
    scale = query.shape[2] ** -0.5 if options.scale is None else check_real("scale", options.scale)
    return Resolved(
        window if window is None else min(window, MAX_POSITIONS),
        check_integer("query_len", options.query_len, minimum=1),
        scale,
        check_scale("k_scale", tensors.k_scale, tensors.key_cache, like=query)[1],
        check_scale("v_scale", tensors.v_scale, value_cache, like=query)[1],
        check_softcap(options.softcap),
        (query.shape[0], query.shape[1], value_cache.shape[3]),
        check_out_dtype(options.out_dtype, query, tensors.out),
        "",
    )


def _signature(tensor: Any) -> Any:
    """Return all that ``_resolve`` looks at in an argument."""
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    if tensor is None or isinstance(tensor, (bool, int, float)):
        return repr(tensor), type(tensor)  # 0.0 equals -0.0
    raise TypeError  # everything else is looked at afresh
