"""The combine kernel: merge partial attentions, add the sink, apply the gate, round.

Serves the splits of one call (base-2 LSEs in the workspace) and ``merge_states`` (natural LSEs, any strides).
Partials are summed one after another in order, so that partials which saw nothing change no bit wherever they stand.
"""

import triton
import triton.language as tl

from swa_torch._triton._pieces import (
    LN2,
    LOG2E,
    add_sink,
    load_pieces,
    log_sum_exp,
    reciprocal,
    round_and_gate,
    scale_pieces,
    sigmoid,
    store_pieces,
    zero_pieces,
)

UNROLLED_PARTS: tl.constexpr = tl.constexpr(16)
"""Up to this many parts every load is issued before any arithmetic; more go through a loop."""


@triton.jit
def add_part(partial, lse, pivot, accumulator, total, TO_BASE_2: tl.constexpr, V_PIECES: tl.constexpr):
    """Add one part, weighted by ``2 ** (lse - pivot)``; a part of weight 0 adds nothing, whatever its memory holds."""
    weight = tl.exp2((lse - pivot) * TO_BASE_2)
    summed = ()
    for i in tl.static_range(V_PIECES):
        product = partial[i].to(tl.float32) * weight
        summed = summed + (accumulator[i] + tl.where(weight == 0.0, 0.0, product),)
    return summed, total + weight


@triton.jit(
    do_not_specialize=[
        "part_step",
        "token_step",
        "head_step",
        "lse_part",
        "lse_token",
        "lse_head",
        "gate_row",
        "gate_head",
    ],
    do_not_specialize_on_alignment=["PartialLse", "Sinks", "Gate", "Lse"],
)
def swa_decode_combine(
    Partial, PartialLse, Sinks, Gate, Output, Lse,
    part_step, token_step, head_step, lse_part, lse_token, lse_head, gate_row, gate_head,
    OUT_TOKEN: tl.constexpr, OUT_HEAD: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    V_DIM: tl.constexpr, V_PIECE: tl.constexpr, V_PIECES: tl.constexpr,
    ALIGNED: tl.constexpr, NATURAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one (token, head); grid ``(tokens, heads)``."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # --- ids ---
    TO_BASE_2: tl.constexpr = LOG2E if NATURAL else 1.0
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if ALIGNED:
        # 16-byte loads: the compiler cannot see that these steps are multiples of 16.
        part_step = tl.multiple_of(part_step, 16)
        token_step = tl.multiple_of(token_step, 16)
        head_step = tl.multiple_of(head_step, 16)
    base = Partial + (token * token_step + head * head_step) + tl.zeros((1, 1), tl.int64)
    lse_base = PartialLse + token * lse_token + head * lse_head + tl.zeros((1,), tl.int64)

    # --- merge ---
    running_max = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    accumulator = zero_pieces(1, V_PIECE, V_PIECES)
    if PARTS <= UNROLLED_PARTS:
        partials = ()
        lses = ()
        for part in tl.static_range(PARTS):
            step = tl.full((1,), part, tl.int64)
            partials = partials + (load_pieces(base + step[:, None] * part_step, True, V_DIM, V_PIECE, V_PIECES),)
            lses = lses + (tl.load(lse_base + step * lse_part),)
        for part in tl.static_range(PARTS):
            running_max = tl.maximum(running_max, lses[part])
        pivot = tl.where(running_max == -float("inf"), 0.0, running_max)
        for part in tl.static_range(PARTS):
            accumulator, total = add_part(partials[part], lses[part], pivot, accumulator, total, TO_BASE_2, V_PIECES)
    else:
        for part in tl.range(0, PARTS):
            step = part + tl.zeros((1,), tl.int64)
            running_max = tl.maximum(running_max, tl.load(lse_base + step * lse_part))
        pivot = tl.where(running_max == -float("inf"), 0.0, running_max)
        for part in tl.range(0, PARTS):
            step = part + tl.zeros((1,), tl.int64)
            partial = load_pieces(base + step[:, None] * part_step, True, V_DIM, V_PIECE, V_PIECES)
            lse = tl.load(lse_base + step * lse_part)
            accumulator, total = add_part(partial, lse, pivot, accumulator, total, TO_BASE_2, V_PIECES)

    # --- store ---
    running_max = running_max * TO_BASE_2
    factor = tl.full((1,), 1.0, tl.float32)
    if Sinks is not None:
        sink = tl.load(Sinks + head + tl.zeros((1,), tl.int64)).to(tl.float32) * LOG2E
        factor, running_max, total = add_sink(running_max, total, sink)
    attention = scale_pieces(accumulator, (factor * reciprocal(total))[:, None], V_PIECES)
    gate_factor = tl.full((1, 1), 1.0, tl.float32)
    if Gate is not None:
        gate = tl.load(Gate + token * gate_row + head * gate_head + tl.zeros((1,), tl.int64))
        gate_factor = tl.where(total == 0.0, 0.0, sigmoid(gate))[:, None]
    OUT_DTYPE: tl.constexpr = Output.dtype.element_ty
    attention = round_and_gate(attention, gate_factor, OUT_DTYPE, Gate is not None, V_PIECES)
    out_base = Output + (token * OUT_TOKEN + head * OUT_HEAD) + tl.zeros((1, 1), tl.int64)
    store_pieces(out_base, attention, True, V_DIM, V_PIECE, V_PIECES)
    if Lse is not None:
        lse_out = Lse + token * HEADS + head + tl.zeros((1,), tl.int64)
        tl.store(lse_out, log_sum_exp(running_max, total) * LN2)
