"""The append kernel: write new keys and values into their slots, quantising on the way."""

import triton
import triton.language as tl


@triton.jit
def narrow(x, scale, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``cast(clip(x / scale))``, rounded half to even; clipping first, because casts differ on overflow."""
    x = x.to(tl.float32)
    quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    clipped = tl.minimum(tl.maximum(quotient, -LIMIT), LIMIT)
    if DTYPE == tl.int8:
        # Adding 1.5 * 2**23 leaves no fraction bits, so the sum is rounded half to even.
        rounded = (clipped + 12582912.0) - 12582912.0
        return tl.where(quotient == quotient, rounded, 0.0).to(tl.int8)
    else:
        return tl.where(quotient == quotient, clipped, quotient).to(DTYPE)


@triton.jit
def append_head(
    Source, Cache, Scale, scale, row, head, page, slot, row_step, head_step,
    PAGE: tl.constexpr, SLOT: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_STEP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copy one head's vector into its slot."""
    d = tl.arange(0, WIDTH)
    value = tl.load(Source + row * row_step + head * head_step + d, d < DIM)
    if LIMIT is not None:
        if Scale is not None:
            scale = scale * tl.load(Scale + head * SCALE_STEP)
        value = narrow(value, scale, LIMIT, Cache.dtype.element_ty)
    tl.store(Cache + page * PAGE + slot * SLOT + head * HEAD + d, value, d < DIM)


@triton.jit(
    do_not_specialize=["k_scale", "v_scale", "slots", "key_row", "key_head", "value_row", "value_head"],
    do_not_specialize_on_alignment=["SlotMapping", "KScale", "VScale"],
)
def swa_append(
    Key, Value, KeyCache, ValueCache, SlotMapping, KScale, VScale, k_scale, v_scale, slots,
    key_row, key_head, value_row, value_head,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr,
    BLOCK: tl.constexpr, K_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    K_SCALE_STEP: tl.constexpr, V_SCALE_STEP: tl.constexpr, LIMIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Append one (row, kv head); grid ``(rows, kv_heads)``."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    position = tl.load(SlotMapping + row).to(tl.int64)
    if (position >= 0) & (position < slots):
        page = position // BLOCK
        slot = position % BLOCK
        append_head(
            Key, KeyCache, KScale, k_scale, row, head, page, slot, key_row, key_head,
            K_PAGE, K_SLOT, K_HEAD, K_DIM, K_WIDTH, K_SCALE_STEP, LIMIT,
        )  # fmt: skip
        append_head(
            Value, ValueCache, VScale, v_scale, row, head, page, slot, value_row, value_head,
            V_PAGE, V_SLOT, V_HEAD, V_DIM, V_WIDTH, V_SCALE_STEP, LIMIT,
        )  # fmt: skip
