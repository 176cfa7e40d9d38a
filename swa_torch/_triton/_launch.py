"""Host side of the Triton kernels: tensors and a plan in, launches out. Nothing is checked here and nothing
synchronises."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch

from swa_plan._device import DEPENDENT_LAUNCH_CAPABILITY, FP8_CAPABILITY
from swa_plan._shapes import head_pieces, next_power_of_two
from swa_torch._call import DecodeCall
from swa_torch._device import device_profile, interpreter_is_on
from swa_torch._ops import FINITE_MAX
from swa_torch._triton._append import swa_append
from swa_torch._triton._combine import swa_decode_combine
from swa_torch._triton._split import swa_decode_split

PAIR_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
LEAST_PAIRED_PIECE = 32
"""Narrower pieces would leave the tensor cores less than 16 columns."""


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` current for a launch, which Triton does not do itself."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch_options(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Return ``(use_pdl, options for a launch)``."""
    if interpreter_is_on():
        return False, {}
    use_pdl = device_profile(device).capability >= DEPENDENT_LAUNCH_CAPABILITY
    # Rounding must not depend on a Triton release's default.
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if use_pdl:
        options["launch_pdl"] = True
    return use_pdl, options


def readable(cache: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a cache as the kernels can read it on this chip."""
    if cache.dtype == torch.float8_e4m3fn and 0 < device_profile(device).capability < FP8_CAPABILITY:
        return cache.view(torch.uint8)
    return cache


def can_cast_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the append kernel can round to ``dtype``; where it cannot, torch does and the kernel copies.

    Chips before sm_89 cannot convert to fp8 e4m3. Triton's interpreter truncates to bf16, and to fp8 loses a carry.
    """
    if interpreter_is_on():
        return dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    return dtype != torch.float8_e4m3fn or device_profile(device).capability >= FP8_CAPABILITY


def paired(value_cache: torch.Tensor, piece: int, query: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Return a value cache of one-byte elements as 16-bit pairs with their format's name, where its strides allow.

    Any other comes back as ``readable`` has it, with None. Products in fp32 do not run on tensor cores and gain nothing
    from pairs.
    """
    name = PAIR_FORMATS.get(value_cache.dtype)
    start = value_cache.data_ptr(), value_cache.storage_offset()  # torch asks for the second
    odd = any(bytes_ % 2 for bytes_ in (*start, *value_cache.stride()[:3]))
    if name is None or piece < LEAST_PAIRED_PIECE or odd or query.dtype == torch.float32:
        return readable(value_cache, query.device), None
    if name != "int8" and device_profile(query.device).capability >= FP8_CAPABILITY:
        name += "x2"
    return value_cache.view(torch.int16), name


class Launch(NamedTuple):
    """One kernel, and all that it is launched with."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> Any:
        """Launch it; return the compiled kernel."""
        return self.kernel[self.grid](**self.arguments, **self.options)


def decode(call: DecodeCall) -> None:
    """Run split and, with more than one split, combine."""
    if not call.query.shape[0]:
        return
    if not call.block_table.shape[0]:
        call.output.zero_()
        if call.lse is not None:
            call.lse.fill_(-torch.inf)
        return
    with device_guard(call.query.device):
        for launch in launches(call):
            launch.run()


def launches(call: DecodeCall) -> list[Launch]:
    """Return the launches of a call with at least one token and one request."""
    partial, partial_lse = partials(call)
    found = [split_launch(call, partial, partial_lse)]
    if partial is not None:
        found.append(combine_of(call, partial, partial_lse))
    return found


def combine_of(call: DecodeCall, partial: torch.Tensor, partial_lse: torch.Tensor | None) -> Launch:
    """Return the launch that merges the splits of a call."""
    heads, v_dim, splits = *call.output.shape[1:], call.plan.splits
    steps = (heads * v_dim, splits * heads * v_dim, v_dim, heads, splits * heads, 1)
    return combine_launch(
        partial, partial_lse, call.sinks, call.gate, call.output, call.lse, steps, splits, natural=False
    )


def split_launch(call: DecodeCall, partial: torch.Tensor | None, partial_lse: torch.Tensor | None) -> Launch:
    """Return the launch of the split kernel."""
    plan, problem, device = call.plan, call.plan.problem, call.query.device
    requests, max_blocks = call.block_table.shape
    key_cache = readable(call.key_cache, device)
    use_pdl, options = launch_options(device)
    k_piece, k_pieces = head_pieces(problem.k_dim)
    v_piece, v_pieces = head_pieces(problem.v_dim)
    value_cache, pair_format = paired(call.value_cache, v_piece, call.query)
    gate_row, gate_head = gate_strides(call.gate)
    arguments = dict(
        Query=call.query, KeyCache=key_cache, ValueCache=value_cache, BlockTable=call.block_table,
        SeqLens=call.seq_lens, CuQueryLens=call.cu_query_lens, KvStart=call.kv_start, KvEnd=call.kv_end,
        KScale=call.k_scale, VScale=call.v_scale, Sinks=call.sinks, Gate=call.gate,
        Output=call.output, Lse=call.lse, Partial=partial, PartialLse=partial_lse,
        qk_scale=call.scale * call.k_scale_number, v_scale=call.v_scale_number, softcap=call.softcap,
        splits=plan.splits, requests=requests, tokens=call.query.shape[0], pages=key_cache.shape[0],
        max_blocks=max_blocks, table_row=call.block_table.stride(0), gate_row=gate_row, gate_head=gate_head,
        Q_TOKEN=call.query.stride(0), Q_HEAD=call.query.stride(1),
        K_PAGE=key_cache.stride(0), K_SLOT=key_cache.stride(1), K_HEAD=key_cache.stride(2),
        V_PAGE=value_cache.stride(0), V_SLOT=value_cache.stride(1), V_HEAD=value_cache.stride(2),
        OUT_TOKEN=call.output.stride(0), OUT_HEAD=call.output.stride(1),
        KV_HEADS=problem.kv_heads, GROUP=problem.group, HEAD_TILE=problem.head_tile, HEAD_TILES=problem.head_tiles,
        QUERY_LEN=problem.query_len, PACK=plan.pack, ROW_TILES=plan.row_tiles,
        BLOCK=problem.block, WINDOW=problem.window if within_reach(problem.window) else None,
        WHOLE=plan.splits == 1, CHUNK=plan.chunk,
        K_DIM=problem.k_dim, K_PIECE=k_piece, K_PIECES=k_pieces,
        V_DIM=problem.v_dim, V_PIECE=v_piece, V_PIECES=v_pieces,
        K_SCALE_STEP=scale_step(call.k_scale), V_SCALE_STEP=scale_step(call.v_scale), PAIRED=pair_format,
        BLOCK_M=plan.rows, BLOCK_N=plan.tile, STAGES=plan.stages, USE_PDL=use_pdl,
    )  # fmt: skip
    grid = (plan.programs(requests), plan.splits, 1)
    return Launch(swa_decode_split, grid, arguments, {"num_warps": plan.warps, **options})


def merge(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None, gate: torch.Tensor | None, output: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Merge ``[parts, tokens, heads, v_dim]`` with natural LSEs ``[parts, tokens, heads]``."""
    steps = (*outs.stride()[:3], *lses.stride())
    with device_guard(output.device):
        combine_launch(outs, lses, sinks, gate, output, lse, steps, outs.shape[0], natural=True).run()


def combine_launch(partial, partial_lse, sinks, gate, output, lse, steps, parts, *, natural) -> Launch:
    """Return the combine kernel's launch; ``steps`` are the partials' part, token and head steps, then their LSEs'."""
    tokens, heads, v_dim = output.shape
    v_piece, v_pieces = head_pieces(v_dim)
    use_pdl, options = launch_options(output.device)
    part_step, token_step, head_step, lse_part, lse_token, lse_head = steps
    gate_row, gate_head = gate_strides(gate)
    arguments = dict(
        Partial=partial, PartialLse=partial_lse, Sinks=sinks, Gate=gate, Output=output, Lse=lse,
        part_step=part_step, token_step=token_step, head_step=head_step, lse_part=lse_part, lse_token=lse_token,
        lse_head=lse_head, gate_row=gate_row, gate_head=gate_head,
        OUT_TOKEN=output.stride(0), OUT_HEAD=output.stride(1), HEADS=heads, PARTS=parts,
        V_DIM=v_dim, V_PIECE=v_piece, V_PIECES=v_pieces,
        ALIGNED=all(step % 16 == 0 for step in steps[:3]), NATURAL=natural, USE_PDL=use_pdl,
    )  # fmt: skip
    return Launch(swa_decode_combine, (tokens, heads, 1), arguments, {"num_warps": 1, **options})


def append(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping:
    torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k_scale_number: float | None, v_scale_number: float |
    None,
) -> None:  # fmt: skip
    """Write rows of keys and values into their slots; scale numbers are None where nothing is divided."""
    rows = min(slot_mapping.shape[0], key.shape[0])
    pages, block, kv_heads, k_dim = key_cache.shape
    if not rows or not pages:
        return
    device = key.device
    use_pdl, options = launch_options(device)
    limit = None
    if k_scale_number is not None:
        limit = FINITE_MAX.get(key_cache.dtype, math.inf)
    with device_guard(device):
        swa_append[(rows, kv_heads)](
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_number, v_scale_number,
            pages * block, *key.stride()[:2], *value.stride()[:2],
            K_PAGE=key_cache.stride(0), K_SLOT=key_cache.stride(1), K_HEAD=key_cache.stride(2),
            V_PAGE=value_cache.stride(0), V_SLOT=value_cache.stride(1), V_HEAD=value_cache.stride(2),
            BLOCK=block, K_DIM=k_dim, K_WIDTH=next_power_of_two(k_dim),
            V_DIM=value_cache.shape[3], V_WIDTH=next_power_of_two(value_cache.shape[3]),
            K_SCALE_STEP=scale_step(k_scale), V_SCALE_STEP=scale_step(v_scale), LIMIT=limit, USE_PDL=use_pdl,
            num_warps=1, **options,
        )  # fmt: skip


def partials(call: DecodeCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the fp32 partials and their LSEs, in the caller's workspace or in fresh memory."""
    if call.plan.splits == 1:
        return None, None
    offset, needed = call.plan.workspace_layout(call.query.shape[0])
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=call.query.device)
    return workspace[:offset].view(torch.float32), workspace[offset:needed].view(torch.float32)


def gate_strides(gate: torch.Tensor | None) -> tuple[int, int]:
    """Return the gate's strides; zeros without one."""
    return (0, 0) if gate is None else (gate.stride(0), gate.stride(1))


def scale_step(scale: torch.Tensor | None) -> int:
    """Return how far apart the kv heads' scales are: 0 for a scalar."""
    return 0 if scale is None or scale.ndim == 0 else scale.stride(0)


def within_reach(window: int | None) -> bool:
    """Whether a window can ever leave a key out: positions stay below 2**30."""
    return window is not None and window < 1 << 30
