"""Host side of the Gluon kernel: tensors and a plan in, launches out. Nothing is checked here and nothing
synchronises."""

from __future__ import annotations

import functools

import torch

from swa_plan import DeviceProfile, Plan
from swa_plan._choose import choose_tile
from swa_plan._hopper import (
    HOPPER_PIECE,
    box_of,
    chunk_tiles,
    hopper_rows,
    segment_tiles,
)
from swa_plan._shapes import ceil_div
from swa_torch._call import DecodeCall
from swa_torch._device import device_profile
from swa_torch._gluon._descriptors import describe, why_not_described
from swa_torch._gluon._split import swa_decode_split_hopper
from swa_torch._triton import _launch as portable
from swa_torch._triton._launch import Launch, gate_strides, launch_options, scale_step, within_reach


def covers(call: DecodeCall) -> str | None:
    """Return why this kernel cannot run a call, None if it can; the portable kernel then runs it."""
    return call.plan.why_handed_over or why_not_described(call.key_cache) or why_not_described(call.value_cache)


def decode(call: DecodeCall) -> None:
    """Run split and, with more than one split, combine; hand over what the kernel does not cover."""
    if not call.query.shape[0] or not call.block_table.shape[0] or covers(call) is not None:
        portable.decode(call._replace(plan=portable_plan(call.plan, device_profile(call.query.device))))
        return
    with portable.device_guard(call.query.device):
        for launch in launches(call):
            launch.run()


@functools.lru_cache(maxsize=1024)
def portable_plan(plan: Plan, device: DeviceProfile) -> Plan:
    """Return the plan with which the portable kernel does the same: the same programs and partials, its own tile."""
    if plan.why_handed_over is not None:
        return plan  # made for the portable kernel
    tile = choose_tile(plan.problem, plan.pack, plan.splits, device)
    return Plan(plan.problem, "portable", plan.pack, plan.splits, *tile, device=plan.device)


def launches(call: DecodeCall) -> list[Launch]:
    """Return the launches of a call with at least one token and one request."""
    partial, partial_lse = portable.partials(call)
    found = [split_launch(call, partial, partial_lse)]
    if partial is not None:
        found.append(portable.combine_of(call, partial, partial_lse))
    return found


def split_launch(call: DecodeCall, partial: torch.Tensor | None, partial_lse: torch.Tensor | None) -> Launch:
    """Return the launch of the split kernel."""
    plan, problem, device = call.plan, call.plan.problem, call.query.device
    requests, max_blocks = call.block_table.shape
    use_pdl, options = launch_options(device)
    gate_row, gate_head = gate_strides(call.gate)
    segment = segment_tiles(problem, plan.pack, plan.splits)
    arguments = dict(
        Query=call.query, Keys=describe(call.key_cache), Values=describe(call.value_cache),
        BlockTable=call.block_table,
        SeqLens=call.seq_lens, CuQueryLens=call.cu_query_lens, KvStart=call.kv_start, KvEnd=call.kv_end,
        KScale=call.k_scale, VScale=call.v_scale, Sinks=call.sinks, Gate=call.gate,
        Output=call.output, Lse=call.lse, Partial=partial, PartialLse=partial_lse,
        qk_scale=call.scale * call.k_scale_number, v_scale=call.v_scale_number, softcap=call.softcap,
        splits=plan.splits, requests=requests, tokens=call.query.shape[0], pages=call.key_cache.shape[0],
        max_blocks=max_blocks, table_row=call.block_table.stride(0), gate_row=gate_row, gate_head=gate_head,
        Q_TOKEN=call.query.stride(0), Q_HEAD=call.query.stride(1),
        OUT_TOKEN=call.output.stride(0), OUT_HEAD=call.output.stride(1),
        KV_HEADS=problem.kv_heads, GROUP=problem.group, HEAD_TILE=problem.head_tile, HEAD_TILES=problem.head_tiles,
        QUERY_LEN=problem.query_len, PACK=plan.pack, ROW_TILES=plan.row_tiles,
        BLOCK=problem.block, BOX=box_of(problem.block),
        WINDOW=problem.window if within_reach(problem.window) else None, WHOLE=plan.splits == 1,
        K_DIM=problem.k_dim, K_PIECES=ceil_div(problem.k_dim, HOPPER_PIECE),
        V_DIM=problem.v_dim, V_PIECES=ceil_div(problem.v_dim, HOPPER_PIECE),
        K_SCALE_STEP=scale_step(call.k_scale), V_SCALE_STEP=scale_step(call.v_scale),
        BLOCK_M=hopper_rows(problem, plan.pack), SEGMENT=segment,
        ONE_SEGMENT=segment == chunk_tiles(problem, plan.pack, plan.splits), STAGES=plan.stages, USE_PDL=use_pdl,
    )  # fmt: skip
    grid = (plan.programs(requests), plan.splits, 1)
    return Launch(swa_decode_split_hopper, grid, arguments, {"num_warps": plan.warps, **options})
