"""The split kernel: one kv head, ``PACK`` rows of a request, one chunk of its live keys.

With one split it writes the final output, else fp32 partials and their base-2 LSEs. Absent features are ``None`` and
compile to nothing.
"""

import triton
import triton.language as tl

from swa_torch._triton._pieces import (
    LN2,
    LOG2E,
    add_sink,
    interleave_pieces,
    load_pieces,
    log_sum_exp,
    query_key,
    reciprocal,
    round_and_gate,
    scale_pieces,
    sigmoid,
    softmax_step,
    store_pieces,
    tanh,
    weigh_pairs,
    weigh_values,
    zero_pieces,
)

POSITION_LIMIT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def clamp_position(position):
    """Bring a length or position into 32 bits; no table reaches beyond 2**30."""
    return tl.minimum(tl.maximum(position, -POSITION_LIMIT), POSITION_LIMIT).to(tl.int32)


@triton.jit
def ragged_rows(CuQueryLens, request, tokens):
    """Return ``(first token, rows)`` of a request, never beyond the query's tokens."""
    first_token = tl.minimum(tl.maximum(tl.load(CuQueryLens + request), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(CuQueryLens + request + 1), first_token), tokens)
    return first_token, end - first_token


@triton.jit
def is_in_chunk(n, low, end, CHUNK: tl.constexpr):
    """Whether keys belong to a chunk; one cut at absolute positions may begin before the first live key."""
    in_chunk = n < end
    if CHUNK > 0:
        in_chunk = in_chunk & (n >= low)
    return in_chunk


@triton.jit
def load_pages(table, n, low, end, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Load the page ids of a chunk's keys; no other entry of the table is read."""
    return tl.load(table + n // BLOCK, is_in_chunk(n, low, end, CHUNK), other=0)


@triton.jit
def fill_token(
    Output, Lse, PartialLse, token, head, live, value, lse,
    OUT_TOKEN: tl.constexpr, OUT_HEAD: tl.constexpr, HEADS: tl.constexpr, split, splits, WHOLE: tl.constexpr,
    V_DIM: tl.constexpr, V_PIECE: tl.constexpr, V_PIECES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write one token that no program computes: ``value`` and ``lse``, or their partial form."""
    token = token + tl.zeros((BLOCK_M,), tl.int64)
    if WHOLE:
        filled = zero_pieces(BLOCK_M, V_PIECE, V_PIECES)
        filled = scale_pieces(filled, value, V_PIECES)
        base = Output + token[:, None] * OUT_TOKEN + head[:, None] * OUT_HEAD
        store_pieces(base, filled, live[:, None], V_DIM, V_PIECE, V_PIECES)
        if Lse is not None:
            tl.store(Lse + token * HEADS + head, tl.full(head.shape, lse, tl.float32), live)
    else:
        tl.store(PartialLse + (token * splits + split) * HEADS + head, tl.full(head.shape, lse, tl.float32), live)


@triton.jit(
    do_not_specialize=[
        "qk_scale", "v_scale", "softcap", "splits", "requests", "tokens", "pages", "max_blocks", "table_row",
        "gate_row", "gate_head",
    ],
    do_not_specialize_on_alignment=[
        "BlockTable", "SeqLens", "CuQueryLens", "KvStart", "KvEnd", "KScale", "VScale", "Sinks", "Gate", "Lse",
    ],
)  # fmt: skip
def swa_decode_split(
    Query, KeyCache, ValueCache, BlockTable, SeqLens, CuQueryLens, KvStart, KvEnd, KScale, VScale, Sinks, Gate,
    Output, Lse, Partial, PartialLse,
    qk_scale, v_scale, softcap, splits, requests, tokens, pages, max_blocks, table_row, gate_row, gate_head,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr,
    OUT_TOKEN: tl.constexpr, OUT_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_TILE: tl.constexpr, HEAD_TILES: tl.constexpr,
    QUERY_LEN: tl.constexpr, PACK: tl.constexpr, ROW_TILES: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr,
    K_DIM: tl.constexpr, K_PIECE: tl.constexpr, K_PIECES: tl.constexpr,
    V_DIM: tl.constexpr, V_PIECE: tl.constexpr, V_PIECES: tl.constexpr,
    K_SCALE_STEP: tl.constexpr, V_SCALE_STEP: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attend ``PACK`` rows x ``HEAD_TILE`` heads to one chunk; grid ``(requests * row tiles * kv heads * head tiles,
    splits)``."""
    # The trigger lets the next kernel be scheduled early; it reads nothing before its own wait, and neither does this
    # one.
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # --- ids ---
    HEADS: tl.constexpr = KV_HEADS * GROUP
    DTYPE: tl.constexpr = Query.dtype.element_ty
    program = tl.program_id(0)
    split = tl.program_id(1)
    head_tile = program % HEAD_TILES
    kv_head = program // HEAD_TILES % KV_HEADS
    row_tile = program // (HEAD_TILES * KV_HEADS) % ROW_TILES
    request = program // (HEAD_TILES * KV_HEADS * ROW_TILES)
    m = tl.arange(0, BLOCK_M)
    row = m // HEAD_TILE
    head_in_group = head_tile * HEAD_TILE + m % HEAD_TILE
    head = kv_head * GROUP + head_in_group

    # --- ranges: the request's rows, the keys they see, this program's chunk of those ---
    if CuQueryLens is not None:
        first_token, rows = ragged_rows(CuQueryLens, request, tokens)
    else:
        first_token = request * QUERY_LEN
        rows = QUERY_LEN
    seq_len = tl.maximum(clamp_position(tl.load(SeqLens + request)), 0)
    first_row = row_tile * PACK
    count = tl.minimum(rows - first_row, PACK)
    if CuQueryLens is not None:
        count = tl.where(rows <= QUERY_LEN, count, 0)
    first = seq_len - rows + first_row
    low = 0
    if WINDOW is not None:
        low = tl.maximum(first - (WINDOW - 1), 0)
    capacity = max_blocks * BLOCK
    high = tl.where(count > 0, first + count - 1, -1)
    row_low = tl.zeros((BLOCK_M,), tl.int32)
    row_high = first + row
    if WINDOW is not None:
        row_low = row_high - (WINDOW - 1)
    if KvStart is not None:
        kv_start = clamp_position(tl.load(KvStart + request))
        low = tl.maximum(low, kv_start)
        row_low = tl.maximum(row_low, kv_start)
    if KvEnd is not None:
        kv_last = clamp_position(tl.load(KvEnd + request)) - 1
        high = tl.minimum(high, kv_last)
        row_high = tl.minimum(row_high, kv_last)
    # A row that sees a position beyond the table is NaN.
    beyond_table = (row_high >= capacity) & (row_low <= row_high)
    high = tl.minimum(high, capacity - 1)
    if CHUNK > 0:
        start = (low // CHUNK + split) * CHUNK
        end = tl.minimum(start + CHUNK, high + 1)
    else:
        tiles = tl.cdiv(tl.maximum(high + 1 - low, 0), BLOCK_N)
        chunk = tl.cdiv(tiles, splits) * BLOCK_N
        start = low + split * chunk
        end = tl.minimum(start + chunk, high + 1)

    # --- load the query ---
    live = (row < count) & (head_in_group < GROUP)
    token = (first_token + first_row + row).to(tl.int64)
    query_base = Query + token[:, None] * Q_TOKEN + head[:, None].to(tl.int64) * Q_HEAD
    query = load_pieces(query_base, live[:, None], K_DIM, K_PIECE, K_PIECES)

    # --- loop over the chunk's tiles ---
    if KScale is not None:
        qk_scale = qk_scale * tl.load(KScale + kv_head * K_SCALE_STEP)
    if softcap is None:
        qk_scale = qk_scale * LOG2E
    running_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.where(beyond_table, float("nan"), 0.0)
    if PAIRED is None:
        accumulator = zero_pieces(BLOCK_M, V_PIECE, V_PIECES)
    else:
        accumulator = zero_pieces(BLOCK_M, V_PIECE // 2, 2 * V_PIECES)
    table = BlockTable + request.to(tl.int64) * table_row
    key_head = KeyCache + kv_head.to(tl.int64) * K_HEAD
    value_head = ValueCache + kv_head.to(tl.int64) * V_HEAD
    next_page = load_pages(table, start + tl.arange(0, BLOCK_N), low, end, BLOCK, CHUNK)
    for tile in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        n = tile + tl.arange(0, BLOCK_N)
        in_chunk = is_in_chunk(n, low, end, CHUNK)
        # A page id is loaded a tile ahead: were it loaded where it is used, the pipeline would spend its stages on the
        # table and hold one tile of keys and values, however many it is given.
        page = next_page
        next_page = load_pages(table, n + BLOCK_N, low, end, BLOCK, CHUNK)
        known = (page >= 0) & (page < pages)
        readable = (in_chunk & known)[:, None]
        page = page.to(tl.int64)
        slot = n % BLOCK
        if BLOCK * max(K_SLOT, V_SLOT) >= 2**31:
            slot = slot.to(tl.int64)
        key_base = key_head + (page * K_PAGE + slot * K_SLOT)[:, None]
        key = load_pieces(key_base, readable, K_DIM, K_PIECE, K_PIECES)
        # An unknown page makes the logits of the rows that see it NaN.
        logits = query_key(query, key, DTYPE, K_PIECES) * tl.where(known, qk_scale, float("nan"))[None, :]
        if softcap is not None:
            logits = tanh(logits / softcap) * (softcap * LOG2E)
        visible = in_chunk[None, :]
        if PACK > 1:
            visible = visible & (n[None, :] >= row_low[:, None]) & (n[None, :] <= row_high[:, None])
        logits = tl.where(visible, logits, -float("inf"))
        weights, alpha, running_max, total = softmax_step(logits, running_max, total)
        value_base = value_head + (page * V_PAGE + slot * V_SLOT)[:, None]
        if PAIRED is None:
            value = load_pieces(value_base, readable, V_DIM, V_PIECE, V_PIECES)
            accumulator = weigh_values(weights, value, accumulator, alpha, DTYPE, V_PIECES)
        else:
            pairs = load_pieces(value_base, readable, V_DIM // 2, V_PIECE // 2, V_PIECES)
            accumulator = weigh_pairs(weights, pairs, accumulator, alpha, PAIRED, DTYPE, V_PIECES)
    if PAIRED is not None:
        accumulator = interleave_pieces(accumulator, V_PIECES)

    # --- store ---
    if VScale is not None:
        v_scale = v_scale * tl.load(VScale + kv_head * V_SCALE_STEP)
    if WHOLE:
        factor = tl.full((BLOCK_M,), 1.0, tl.float32)
        if Sinks is not None:
            sink = tl.load(Sinks + head, live, other=0.0).to(tl.float32) * LOG2E
            factor, running_max, total = add_sink(running_max, total, sink)
        attention = scale_pieces(accumulator, (factor * reciprocal(total) * v_scale)[:, None], V_PIECES)
        gate_factor = tl.full((BLOCK_M, 1), 1.0, tl.float32)
        if Gate is not None:
            gate = tl.load(Gate + token * gate_row + head.to(tl.int64) * gate_head, live, other=0.0)
            # A row that saw nothing is zero even if its gate is NaN.
            gate_factor = tl.where(total == 0.0, 0.0, sigmoid(gate))[:, None]
        OUT_DTYPE: tl.constexpr = Output.dtype.element_ty
        attention = round_and_gate(attention, gate_factor, OUT_DTYPE, Gate is not None, V_PIECES)
        out_base = Output + token[:, None] * OUT_TOKEN + head[:, None].to(tl.int64) * OUT_HEAD
        store_pieces(out_base, attention, live[:, None], V_DIM, V_PIECE, V_PIECES)
        if Lse is not None:
            tl.store(Lse + token * HEADS + head, log_sum_exp(running_max, total) * LN2, live)
    else:
        attention = scale_pieces(accumulator, (reciprocal(total) * v_scale)[:, None], V_PIECES)
        partial = (token * splits + split) * HEADS + head
        store_pieces(Partial + partial[:, None] * V_DIM, attention, live[:, None], V_DIM, V_PIECE, V_PIECES)
        tl.store(PartialLse + partial, log_sum_exp(running_max, total), live)

    # --- rows that no program computes: a request with too many rows, and padding after the last request ---
    if CuQueryLens is not None:
        # Loaded once more, so that they need not stay in registers during the loop.
        first_token, rows = ragged_rows(CuQueryLens, request, tokens)
        one_row = (row == 0) & (head_in_group < GROUP)
        if (rows > QUERY_LEN) & (row_tile == 0):
            for extra in tl.range(first_token, first_token + rows):
                fill_token(
                    Output, Lse, PartialLse, extra, head, one_row, float("nan"), float("nan"), OUT_TOKEN, OUT_HEAD,
                    HEADS, split, splits, WHOLE, V_DIM, V_PIECE, V_PIECES, BLOCK_M,
                )  # fmt: skip
        used = tl.minimum(tl.maximum(tl.load(CuQueryLens + requests), 0), tokens)
        for padding in tl.range(used + request * ROW_TILES + row_tile, tokens, requests * ROW_TILES):
            fill_token(
                Output, Lse, PartialLse, padding, head, one_row, 0.0, -float("inf"), OUT_TOKEN, OUT_HEAD, HEADS, split,
                splits, WHOLE, V_DIM, V_PIECE, V_PIECES, BLOCK_M,
            )  # fmt: skip
