"""The ``torch.library`` operators: what ``torch.compile``, export and fake tensors see.

Only outputs carry a mutation mark. Plans travel as JSON text. An empty text, or just ``"splits pack"``, lets the
operator plan from the shapes that it meets at run time, so that a call traced with symbolic sizes is planned for its
real ones.
"""

from __future__ import annotations

import torch

from swa_plan import CacheLayout, Plan
from swa_plan._chosen import SplitsAndPack
from swa_torch import _ops
from swa_torch._cache import layer_views
from swa_torch._call import DecodeCall
from swa_torch._device import choose_kernel, refuse_interpreted_bfloat16
from swa_torch._planning import parse_plan, problem_of, resolve_plan
from swa_torch._validate import (
    check_head_options,
    check_no_overlap,
    check_out,
    check_query_and_cache,
    check_rows,
    check_workspace,
)

UNCHECKED = "unchecked "
"""Before a plan's text: whether it serves the call is still to be checked."""

_DECODE_INPUTS = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor? gate, "
    "Tensor? cu_query_lens, Tensor? kv_start, Tensor? kv_end, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "float scale, float k_scale_number, float v_scale_number, float? softcap, int? window, int query_len, "
    "str plan, str? backend, bool batch_invariant, bool return_lse, Tensor(a!) output"
)

library = torch.library.Library("swa_torch", "DEF")
library.define(f"decode({_DECODE_INPUTS}) -> Tensor")
library.define(f"decode_with_workspace({_DECODE_INPUTS}, Tensor(b!) workspace) -> Tensor")
library.define(
    "append(Tensor(a!) key_base, Tensor(b!)? value_base, str layout, int k_dim, int v_dim, int? layer, Tensor key, "
    "Tensor value, Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, float? k_scale_number, float? v_scale_number"
    ") -> ()"
)
library.define("merge_states(Tensor outs, Tensor lses, Tensor? sinks, Tensor? gate, Tensor(a!) output) -> Tensor")


def decode_with_workspace(
    query, key_cache, value_cache, block_table, seq_lens, gate, cu_query_lens, kv_start, kv_end, sinks, k_scale,
    v_scale, scale, k_scale_number, v_scale_number, softcap, window, query_len, plan, backend, batch_invariant,
    return_lse, output, workspace=None,
):  # fmt: skip
    """Run a checked call; return its LSE ``[tokens, heads]``, or an empty tensor where none was asked for."""
    if plan.startswith("{"):
        chosen = parse_plan(plan)
    else:
        given: Plan | SplitsAndPack | None = None
        if plan.startswith(UNCHECKED):
            given = parse_plan(plan.removeprefix(UNCHECKED))
        elif plan:
            splits, pack = plan.split()
            given = SplitsAndPack(int(splits), int(pack))
        problem = problem_of(
            query, key_cache, value_cache, block_table,
            window=window, query_len=query_len, ragged=cu_query_lens is not None,
        )  # fmt: skip
        chosen = resolve_plan(problem, query.device, given, backend, batch_invariant)
        if workspace is not None:
            # The compiler may pass a copy in its place; allocators align copies well enough for vector loads.
            check_workspace(workspace, chosen.workspace_layout(query.shape[0])[1], like=query, alignment=16)
        inputs = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "gate": gate, "sinks": sinks}
        check_no_overlap(output, inputs)
        if chosen.kernel == "interpret":
            refuse_interpreted_bfloat16(query=query, gate=gate, out=output)
    lse = query.new_empty(query.shape[:2] if return_lse else (0,), dtype=torch.float32)
    call = DecodeCall(
        query, key_cache, value_cache, block_table, seq_lens, gate, cu_query_lens, kv_start, kv_end, sinks, k_scale,
        v_scale, scale, k_scale_number, v_scale_number, softcap, output, lse if return_lse else None, workspace, chosen,
    )  # fmt: skip
    if chosen.kernel == "ops":
        _ops.decode(call)
    elif chosen.kernel == "hopper":
        from swa_torch._gluon import _launch

        _launch.decode(call)
    else:
        from swa_torch._triton import _launch

        _launch.decode(call)
    return lse


def decode(*arguments):
    """Run a checked call that takes its scratch memory from the current allocator."""
    return decode_with_workspace(*arguments)


def decode_fake(
    query, key_cache, value_cache, block_table, seq_lens, gate, cu_query_lens, kv_start, kv_end, sinks, k_scale,
    v_scale, scale, k_scale_number, v_scale_number, softcap, window, query_len, plan, backend, batch_invariant,
    return_lse, output, workspace=None,
):  # fmt: skip
    """Check shapes and dtypes while tracing; the operator itself only meets checked calls."""
    check_query_and_cache(query, key_cache, value_cache)
    check_rows(
        query, block_table, seq_lens,
        query_len=query_len, cu_query_lens=cu_query_lens, kv_start=kv_start, kv_end=kv_end,
    )  # fmt: skip
    check_head_options(query, gate, sinks)
    shape = (query.shape[0], query.shape[1], value_cache.shape[3])
    check_out(output, shape, output.dtype, like=query)
    return query.new_empty(query.shape[:2] if return_lse else (0,), dtype=torch.float32)


def append(
    key_base, value_base, layout, k_dim, v_dim, layer, key, value, slot_mapping, k_scale, v_scale, k_scale_number,
    v_scale_number,
) -> None:  # fmt: skip
    """Write checked rows of keys and values into the base(s)."""
    bases = (key_base,) if value_base is None else (key_base, value_base)
    key_cache, value_cache = layer_views(bases, CacheLayout.parse(layout), k_dim, v_dim, layer)
    k_divisor, v_divisor = (
        None if number is None else number if tensor is None else tensor
        for tensor, number in ((k_scale, k_scale_number), (v_scale, v_scale_number))
    )
    if choose_kernel(key.device, None) == "ops":
        _ops.append(key, value, key_cache, value_cache, slot_mapping, k_divisor, v_divisor)
        return
    from swa_torch._triton import _launch

    can_cast = _launch.can_cast_to(key_cache.dtype, key.device)
    if k_divisor is not None and v_divisor is not None and not can_cast:
        key = _ops.quantise(key, k_divisor, key_cache.dtype)
        value = _ops.quantise(value, v_divisor, value_cache.dtype)
        k_scale = v_scale = k_scale_number = v_scale_number = None
    if key.dtype == key_cache.dtype and key.itemsize == 1:
        key, value, key_cache, value_cache = (each.view(torch.uint8) for each in (key, value, key_cache, value_cache))
    _launch.append(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_number, v_scale_number)


def append_fake(*arguments) -> None:
    """Append returns nothing."""


def merge_states(outs, lses, sinks, gate, output):
    """Merge checked partial attentions; return the merged LSE."""
    lse = outs.new_empty(outs.shape[1:3], dtype=torch.float32)
    if not outs.shape[1]:
        return lse
    kernel = choose_kernel(outs.device, None)
    if kernel == "ops":
        _ops.merge(outs, lses, sinks, gate, output, lse)
    else:
        if kernel == "interpret":
            refuse_interpreted_bfloat16(outs=outs, gate=gate, out=output)
        from swa_torch._triton import _launch

        _launch.merge(outs, lses, sinks, gate, output, lse)
    return lse


def merge_states_fake(outs, lses, sinks, gate, output):
    """Return the shape of the merged LSE."""
    return outs.new_empty(outs.shape[1:3], dtype=torch.float32)


for name, run, fake in (
    ("decode", decode, decode_fake),
    ("decode_with_workspace", decode_with_workspace, decode_fake),
    ("append", append, append_fake),
    ("merge_states", merge_states, merge_states_fake),
):
    library.impl(name, run, "CPU")
    library.impl(name, run, "CUDA")
    torch.library.register_fake(f"swa_torch::{name}", fake, lib=library)
