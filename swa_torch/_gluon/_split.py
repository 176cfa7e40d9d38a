"""The split kernel for Hopper: one kv head, ``PACK`` rows of a request, one chunk of its live keys.

Computes what ``swa_torch._triton._split`` computes, by other means. Products are transposed, so that the 64 rows of a
warpgroup's matrix are keys (or dims of values) and not padding: ``logits[keys, rows] = keys @ query.T`` and
``accumulator[dims, rows] += values.T @ weights.T``, with keys and values read from shared memory where TMA put them. A
segment of up to ``SEGMENT`` tiles is taken in two phases: all its keys, whose logits stay in registers, one softmax,
then all its values. With one split this writes the final output, else fp32 partials and their base-2 LSEs. Absent
features are ``None`` and compile to nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from swa_torch._gluon._pieces import (
    LN2,
    LOG2E,
    PIECE,
    add_sink,
    barrier,
    log_sum_exp,
    reciprocal,
    reinterpret,
    round_and_gate,
    scale_pieces,
    sigmoid,
    store_columns,
    store_pieces,
    tanh,
    zero_pieces,
)
from swa_torch._gluon._ring import (
    TILE,
    box_shift,
    copy_step,
    copy_tile,
    load_pages,
    tile_at,
    unknown_boxes,
)

POSITION_LIMIT: gl.constexpr = gl.constexpr(1 << 30)
GRANULE: gl.constexpr = gl.constexpr(16)
"""Chunks are whole multiples of this many keys."""


@gluon.jit
def clamp_position(position):
    """Bring a length or position into 32 bits; no table reaches beyond 2**30."""
    return gl.minimum(gl.maximum(position, -POSITION_LIMIT), POSITION_LIMIT).to(gl.int32)


@gluon.jit
def ragged_rows(CuQueryLens, request, tokens):
    """Return ``(first token, rows)`` of a request, never beyond the query's tokens."""
    first_token = gl.minimum(gl.maximum(gl.load(CuQueryLens + request), 0), tokens).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(CuQueryLens + request + 1), first_token), tokens).to(gl.int32)
    return first_token, end - first_token


@gluon.jit
def load_query(
    Query, token, head, live, Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, DIM: gl.constexpr, PIECES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load pieces ``[rows, PIECE]`` of rows ``token, head`` of the query; what is not live is zero."""
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    base = Query + token.to(gl.int64)[:, None] * Q_TOKEN + head.to(gl.int64)[:, None] * Q_HEAD
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces = pieces + (gl.load(base + i * PIECE + d, live[:, None] & (i * PIECE + d < DIM), other=0.0),)
    return pieces


@gluon.jit
def shared_pieces(DTYPE: gl.constexpr, SHAPE: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return shared memory for each piece."""
    memory = ()
    for _ in gl.static_range(PIECES):
        memory = memory + (gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT),)
    return memory


@gluon.jit
def boxed_pieces(slots, cache, BOXES: gl.constexpr, PIECES: gl.constexpr):
    """Return the same memory as boxes of a cache."""
    boxed = ()
    for i in gl.static_range(PIECES):
        boxed = boxed + (reinterpret(slots[i], cache.dtype, [BOXES] + cache.block_type.shape, cache.layout),)
    return boxed


@gluon.jit
def query_key(
    query_tiles, first: gl.constexpr, slots, slot, BLOCK_M: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return fp32 ``keys @ query.T`` ``[keys, rows]`` of the keys in a slot."""
    logits = gl.zeros([TILE, BLOCK_M], gl.float32, layout=LAYOUT)
    for i in gl.static_range(PIECES):
        query = query_tiles.index(first + i).permute((1, 0))
        logits = warpgroup_mma(slots[i].index(slot), query, logits, use_acc=i > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[logits])


@gluon.jit
def weigh_values(weights, slots, slot, accumulator, PIECES: gl.constexpr):
    """Return ``accumulator + values.T @ weights`` in fp32, of the values in a slot; weights ``[keys, rows]``."""
    summed = ()
    for i in gl.static_range(PIECES):
        value = slots[i].index(slot).permute((1, 0))
        summed = summed + (warpgroup_mma(value, weights, accumulator[i], is_async=True),)
    if PIECES == 1:
        return (warpgroup_mma_wait(0, deps=[summed[0]]),)
    elif PIECES == 2:
        return warpgroup_mma_wait(0, deps=[summed[0], summed[1]])
    elif PIECES == 3:
        return warpgroup_mma_wait(0, deps=[summed[0], summed[1], summed[2]])
    else:
        return warpgroup_mma_wait(0, deps=[summed[0], summed[1], summed[2], summed[3]])


@gluon.jit
def erase_stale_values(slots, slot, first_row, end_row, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Zero rows ``[first_row, end_row)`` of the values in a slot, which were copied and are not visible."""
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    stale = (n >= first_row) & (n < end_row)
    for i in gl.static_range(PIECES):
        piece = slots[i].index(slot)
        value = piece.load(LAYOUT)
        piece.store(gl.where(stale[:, None], 0.0, value).to(value.dtype))
    fence_async_shared()
    barrier()  # no warp's product may read before every warp's fence


@gluon.jit
def fill_token(
    Output, Lse, PartialLse, token, head, live, value, lse,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, HEADS: gl.constexpr, split, splits, WHOLE: gl.constexpr,
    V_DIM: gl.constexpr, V_PIECES: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write one token that no program computes: ``value`` and ``lse``, or their partial form."""
    token = token.to(gl.int64)
    lses = gl.full([BLOCK_M], lse, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    if WHOLE:
        d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        filled = gl.full([BLOCK_M, PIECE], value, gl.float32, layout=LAYOUT).to(Output.dtype.element_ty)
        base = Output + token * OUT_TOKEN + head.to(gl.int64)[:, None] * OUT_HEAD
        for i in gl.static_range(V_PIECES):
            gl.store(base + i * PIECE + d, filled, live[:, None] & (i * PIECE + d < V_DIM))
        if Lse is not None:
            gl.store(Lse + token * HEADS + head, lses, live)
    else:
        gl.store(PartialLse + (token * splits + split) * HEADS + head, lses, live)


@gluon.jit(
    do_not_specialize=[
        "qk_scale", "v_scale", "softcap", "splits", "requests", "tokens", "pages", "max_blocks", "table_row",
        "gate_row", "gate_head",
    ],
    do_not_specialize_on_alignment=[
        "BlockTable", "SeqLens", "CuQueryLens", "KvStart", "KvEnd", "KScale", "VScale", "Sinks", "Gate", "Lse",
    ],
)  # fmt: skip
def swa_decode_split_hopper(
    Query, Keys, Values, BlockTable, SeqLens, CuQueryLens, KvStart, KvEnd, KScale, VScale, Sinks, Gate,
    Output, Lse, Partial, PartialLse,
    qk_scale, v_scale, softcap, splits, requests, tokens, pages, max_blocks, table_row, gate_row, gate_head,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_TILE: gl.constexpr, HEAD_TILES: gl.constexpr,
    QUERY_LEN: gl.constexpr, PACK: gl.constexpr, ROW_TILES: gl.constexpr,
    BLOCK: gl.constexpr, BOX: gl.constexpr, WINDOW: gl.constexpr, WHOLE: gl.constexpr,
    K_DIM: gl.constexpr, K_PIECES: gl.constexpr, V_DIM: gl.constexpr, V_PIECES: gl.constexpr,
    K_SCALE_STEP: gl.constexpr, V_SCALE_STEP: gl.constexpr,
    BLOCK_M: gl.constexpr, SEGMENT: gl.constexpr, ONE_SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """Attend ``PACK`` rows x ``HEAD_TILE`` heads to one chunk; grid ``(requests * row tiles * kv heads * head tiles,
    splits)``."""
    # The trigger lets the next kernel be scheduled early; it reads nothing before its own wait, and neither does this
    # one.
    if USE_PDL:
        gdc_launch_dependents()

    # --- layouts and shared memory ---
    DTYPE: gl.constexpr = Query.dtype.element_ty
    SLOT_PIECES: gl.constexpr = K_PIECES if K_PIECES > V_PIECES else V_PIECES
    BOXES: gl.constexpr = TILE // BOX
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4],
                                                      [16, BLOCK_M * 4 // gl.num_warps(), 16])  # fmt: skip
    BY_ROW: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    MEMORY: gl.constexpr = NARROW if BLOCK_M == 8 else WIDE
    BY_MEMORY_ROW: gl.constexpr = gl.SliceLayout(1, MEMORY)
    slots = shared_pieces(DTYPE, [STAGES, TILE, PIECE], SLOT_PIECES, SWIZZLED)
    boxed = boxed_pieces(slots, Keys, STAGES * BOXES, SLOT_PIECES)
    # The query's pieces have the form of weights; one segment needs it no more when there are weights to store.
    QUERY_AT: gl.constexpr = 0 if ONE_SEGMENT else SEGMENT
    LEAST_TILES: gl.constexpr = SEGMENT if SEGMENT > K_PIECES else K_PIECES
    weight_tiles = gl.allocate_shared_memory(
        DTYPE, [LEAST_TILES if ONE_SEGMENT else SEGMENT + K_PIECES, BLOCK_M, TILE], SWIZZLED
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()

    # --- ids ---
    HEADS: gl.constexpr = KV_HEADS * GROUP
    program = gl.program_id(0)
    split = gl.program_id(1)
    head_tile = program % HEAD_TILES
    kv_head = program // HEAD_TILES % KV_HEADS
    row_tile = program // (HEAD_TILES * KV_HEADS) % ROW_TILES
    request = program // (HEAD_TILES * KV_HEADS * ROW_TILES)
    m = gl.arange(0, BLOCK_M, layout=BY_ROW)
    row = m // HEAD_TILE
    head_in_group = head_tile * HEAD_TILE + m % HEAD_TILE
    head = kv_head * GROUP + head_in_group

    # --- the request's rows ---
    if CuQueryLens is not None:
        first_token, rows = ragged_rows(CuQueryLens, request, tokens)
    else:
        first_token = request * QUERY_LEN
        rows = QUERY_LEN
    length = gl.load(SeqLens + request)
    first_row = row_tile * PACK
    count = gl.minimum(rows - first_row, PACK)
    if CuQueryLens is not None:
        count = gl.where(rows <= QUERY_LEN, count, 0)

    # --- load the query and the gate: before keys and values, in whose queue they would wait ---
    live = (row < count) & (head_in_group < GROUP)
    token = first_token + first_row + row
    memory_m = gl.arange(0, BLOCK_M, layout=BY_MEMORY_ROW)
    memory_row = memory_m // HEAD_TILE
    memory_head_in_group = head_tile * HEAD_TILE + memory_m % HEAD_TILE
    memory_live = (memory_row < count) & (memory_head_in_group < GROUP)
    memory_head = kv_head * GROUP + memory_head_in_group
    memory_token = first_token + first_row + memory_row
    query = load_query(Query, memory_token, memory_head, memory_live, Q_TOKEN, Q_HEAD, K_DIM, K_PIECES, MEMORY)
    if WHOLE:
        if Gate is not None:
            gate_at = token.to(gl.int64) * gate_row + head.to(gl.int64) * gate_head
            gate = gl.load(Gate + gate_at, live, other=0.0)

    # --- ranges: the keys that the rows see, this program's chunk of those ---
    seq_len = gl.maximum(clamp_position(length), 0)
    first = seq_len - rows + first_row
    low = 0
    if WINDOW is not None:
        low = gl.maximum(first - (WINDOW - 1), 0)
    capacity = max_blocks * BLOCK
    high = gl.where(count > 0, first + count - 1, -1)
    row_low = gl.zeros([BLOCK_M], gl.int32, layout=BY_ROW)
    row_high = first + row
    if WINDOW is not None:
        row_low = row_high - (WINDOW - 1)
    if KvStart is not None:
        kv_start = clamp_position(gl.load(KvStart + request))
        low = gl.maximum(low, kv_start)
        row_low = gl.maximum(row_low, kv_start)
    if KvEnd is not None:
        kv_last = clamp_position(gl.load(KvEnd + request)) - 1
        high = gl.minimum(high, kv_last)
        row_high = gl.minimum(row_high, kv_last)
    # A row that sees a position beyond the table is NaN.
    beyond_table = (row_high >= capacity) & (row_low <= row_high)
    high = gl.minimum(high, capacity - 1)
    start = low
    end = high + 1
    if not WHOLE:
        granules = gl.cdiv(gl.maximum(end - low, 0), GRANULE)
        chunk = gl.cdiv(granules, splits) * GRANULE
        start = low + split * chunk
        end = gl.minimum(start + chunk, end)

    # --- the chunk's boxes and tiles, and the first copies ---
    table = BlockTable + request.to(gl.int64) * table_row
    origin = start // BOX * BOX
    boxes = gl.cdiv(gl.maximum(end - origin, 0), BOX)
    boxes = gl.where(start < end, boxes, 0)
    tiles = gl.cdiv(boxes, TILE // BOX)
    head_shift = start - origin
    tail_shift = end - (origin + boxes * BOX)
    FIRST_TILES: gl.constexpr = SEGMENT if ONE_SEGMENT or SEGMENT < STAGES else STAGES
    ids = load_pages(table, 0, boxes, origin, pages, FIRST_TILES * BOXES, BLOCK, BOX)
    unknown = unknown_boxes(ids, FIRST_TILES * BOXES)
    first_tiles = gl.minimum(tiles, SEGMENT)
    for stage in gl.static_range(STAGES if STAGES < SEGMENT else SEGMENT):
        if stage < first_tiles:
            copy_tile(
                Keys, ids, stage, origin, boxes, head_shift, tail_shift, kv_head, boxed, full, stage, stage * BOXES,
                BLOCK, BOX, K_PIECES,
            )  # fmt: skip
    for stage in gl.static_range(1, STAGES):
        if (stage >= first_tiles) & (stage < 2 * tiles):
            tile, of_values = tile_at(stage, tiles, SEGMENT, ONE_SEGMENT)
            value_ids = load_pages(table, tile * BOXES, boxes, origin, pages, BOXES, BLOCK, BOX)
            copy_step(
                Keys, Values, value_ids, tile, of_values, origin, boxes, head_shift, tail_shift, kv_head, boxed, full,
                stage, BLOCK, BOX, K_PIECES, V_PIECES, ONE_SEGMENT,
            )  # fmt: skip

    # --- the query, which has arrived by now ---
    for i in gl.static_range(K_PIECES):
        weight_tiles.index(QUERY_AT + i).store(query[i])
    fence_async_shared()
    if WHOLE:
        if Gate is not None:
            opened = sigmoid(gate)

    # --- loop over the chunk's segments: keys, softmax, values ---
    if KScale is not None:
        qk_scale = qk_scale * gl.load(KScale + kv_head * K_SCALE_STEP)
    if softcap is None:
        qk_scale = qk_scale * LOG2E
    running_max = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=BY_ROW)
    total = gl.where(beyond_table, float("nan"), 0.0)
    accumulator = zero_pieces(BLOCK_M, V_PIECES, PRODUCT)
    n = gl.arange(0, TILE, layout=BY_KEY)
    segments = 1
    if not ONE_SEGMENT:
        segments = gl.cdiv(tiles, SEGMENT)
    for segment in range(segments):
        first_tile = segment * SEGMENT
        segment_tiles = gl.minimum(tiles - first_tile, SEGMENT)
        first_step = 2 * first_tile
        logits = ()
        highest = gl.full([TILE, BLOCK_M], -float("inf"), gl.float32, layout=PRODUCT)
        for i in gl.static_range(SEGMENT):
            scores = gl.full([TILE, BLOCK_M], -float("inf"), gl.float32, layout=PRODUCT)
            if i < segment_tiles:
                step = first_step + i
                next_step = step + STAGES
                next_tile, next_of_values = tile_at(next_step, tiles, SEGMENT, ONE_SEGMENT)
                next_ids = load_pages(table, next_tile * BOXES, boxes, origin, pages, BOXES, BLOCK, BOX)
                if ONE_SEGMENT:
                    tile_unknown = (unknown >> i * BOXES).to(gl.int32)
                else:
                    tile_ids = load_pages(table, (first_tile + i) * BOXES, boxes, origin, pages, BOXES, BLOCK, BOX)
                    tile_unknown = unknown_boxes(tile_ids, BOXES).to(gl.int32)
                box = (first_tile + i) * (TILE // BOX) + n // BOX
                in_box = n % BOX + box_shift(box, boxes, head_shift, tail_shift)
                position = origin + box * BOX + in_box
                in_chunk = (position >= start) & (position < end) & (in_box >= 0) & (in_box < BOX)
                known = (tile_unknown >> n // BOX & 1) == 0
                slot = step % STAGES
                mbarrier.wait(full.index(slot), step // STAGES & 1)
                products = query_key(weight_tiles, QUERY_AT, slots, slot, BLOCK_M, K_PIECES, PRODUCT)
                if next_step < 2 * tiles:
                    barrier()
                    copy_step(
                        Keys, Values, next_ids, next_tile, next_of_values, origin, boxes, head_shift, tail_shift,
                        kv_head, boxed, full, slot, BLOCK, BOX, K_PIECES, V_PIECES,
                        ONE_SEGMENT and i + STAGES >= SEGMENT,
                    )  # fmt: skip
                # An unknown page makes the logits of the rows that see it NaN.
                products = products * gl.where(known, qk_scale, float("nan"))[:, None]
                if softcap is not None:
                    products = tanh(products / softcap) * (softcap * LOG2E)
                visible = in_chunk[:, None]
                if PACK > 1:
                    visible = (
                        visible & (position[:, None] >= row_low[None, :]) & (position[:, None] <= row_high[None, :])
                    )
                scores = gl.where(visible, products, -float("inf"))
            highest = gl.maximum(highest, scores)
            logits = logits + (scores,)
        new_max = gl.maximum(running_max, gl.max(highest, axis=0))
        pivot = gl.where(new_max == -float("inf"), 0.0, new_max)
        summed = gl.zeros([TILE, BLOCK_M], gl.float32, layout=PRODUCT)
        for i in gl.static_range(SEGMENT):
            weights = gl.exp2(logits[i] - pivot[None, :])
            summed += weights
            weight_tiles.index(i).store(gl.permute(weights.to(DTYPE), (1, 0)))
        fence_async_shared()
        if ONE_SEGMENT:
            total = total + gl.sum(summed, axis=0)
        else:
            alpha = gl.exp2(running_max - pivot)
            total = total * alpha + gl.sum(summed, axis=0)
            accumulator = scale_pieces(accumulator, alpha[None, :], V_PIECES)
        running_max = new_max
        if (boxes == 1) & (head_shift > 0) & (tail_shift < 0):
            # Both ends of the chunk lie inside one box, which could be shifted to only one of them.
            mbarrier.wait(full.index(1), 0)
            erase_stale_values(slots, 1, -tail_shift, head_shift - tail_shift, V_PIECES, WIDE)
        for j in range(segment_tiles):
            step = first_step + segment_tiles + j
            next_step = step + STAGES
            next_tile, next_of_values = tile_at(next_step, tiles, SEGMENT, ONE_SEGMENT)
            next_ids = load_pages(table, next_tile * BOXES, boxes, origin, pages, BOXES, BLOCK, BOX)
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            tile_weights = weight_tiles.index(j).permute((1, 0))
            accumulator = weigh_values(tile_weights, slots, slot, accumulator, V_PIECES)
            if next_step < 2 * tiles:
                barrier()
                copy_step(
                    Keys, Values, next_ids, next_tile, next_of_values, origin, boxes, head_shift, tail_shift, kv_head,
                    boxed, full, slot, BLOCK, BOX, K_PIECES, V_PIECES, ONE_SEGMENT,
                )  # fmt: skip

    # --- store ---
    if VScale is not None:
        v_scale = v_scale * gl.load(VScale + kv_head * V_SCALE_STEP)
    if WHOLE:
        factor = gl.full([BLOCK_M], 1.0, gl.float32, layout=BY_ROW)
        if Sinks is not None:
            sink = gl.load(Sinks + head, live, other=0.0).to(gl.float32) * LOG2E
            factor, running_max, total = add_sink(running_max, total, sink)
        attention = scale_pieces(accumulator, (factor * reciprocal(total) * v_scale)[None, :], V_PIECES)
        gate_factor = gl.full([1, BLOCK_M], 1.0, gl.float32, layout=PRODUCT)
        if Gate is not None:
            # A row that saw nothing is zero even if its gate is NaN.
            gate_factor = gl.where(total == 0.0, 0.0, opened)[None, :]
        OUT_DTYPE: gl.constexpr = Output.dtype.element_ty
        attention = round_and_gate(attention, gate_factor, OUT_DTYPE, Gate is not None, V_PIECES)
        # What turns the output lies where the ring was, which the other warpgroup's last product may still read: Triton
        # counts an asynchronous product as read when it is started (triton#11047).
        barrier()
        out_base = (
            Output + memory_token.to(gl.int64)[:, None] * OUT_TOKEN + memory_head.to(gl.int64)[:, None] * OUT_HEAD
        )
        store_pieces(out_base, attention, memory_live, V_DIM, V_PIECES, MEMORY)
        if Lse is not None:
            gl.store(Lse + token.to(gl.int64) * HEADS + head, log_sum_exp(running_max, total) * LN2, live)
    else:
        attention = scale_pieces(accumulator, (reciprocal(total) * v_scale)[None, :], V_PIECES)
        partial = (token.to(gl.int64) * splits + split) * HEADS + head
        store_columns(Partial + partial[None, :] * V_DIM, attention, live, V_DIM, V_PIECES, PRODUCT)
        gl.store(PartialLse + partial, log_sum_exp(running_max, total), live)

    # --- rows that no program computes: a request with too many rows, and padding after the last request ---
    if CuQueryLens is not None:
        # Loaded once more, so that they need not stay in registers during the loop.
        first_token, rows = ragged_rows(CuQueryLens, request, tokens)
        one_row = (memory_row == 0) & (memory_head_in_group < GROUP)
        if (rows > QUERY_LEN) & (row_tile == 0):
            for extra in range(first_token, first_token + rows):
                fill_token(
                    Output, Lse, PartialLse, extra, memory_head, one_row, float("nan"), float("nan"), OUT_TOKEN,
                    OUT_HEAD, HEADS, split, splits, WHOLE, V_DIM, V_PIECES, BLOCK_M, MEMORY,
                )  # fmt: skip
        used = gl.minimum(gl.maximum(gl.load(CuQueryLens + requests), 0), tokens).to(gl.int32)
        for padding in range(used + request * ROW_TILES + row_tile, tokens, requests * ROW_TILES):
            fill_token(
                Output, Lse, PartialLse, padding, memory_head, one_row, 0.0, -float("inf"), OUT_TOKEN, OUT_HEAD,
                HEADS, split, splits, WHOLE, V_DIM, V_PIECES, BLOCK_M, MEMORY,
            )  # fmt: skip
