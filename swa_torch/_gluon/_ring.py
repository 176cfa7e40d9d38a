"""The ring of shared-memory slots through which keys and values come: which boxes a tile has, and copying them.

A tile is 64 keys or the values of 64 keys, copied by TMA in boxes of ``BOX`` consecutive slots of one page. Boxes start
at absolute multiples of ``BOX``, so that none crosses a page. Only the keys of a chunk are read: the first and the last
box are shifted, and what then lies outside a box, as what lies outside the cache, TMA fills with zeros and counts as
copied. Zeros are what is needed: a weight of zero times a stale NaN would be NaN. A chunk with both ends inside one box
is the exception; there the kernel erases what was read in front of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from swa_torch._gluon._pieces import PIECE, copy_box

TILE: gl.constexpr = gl.constexpr(64)
"""Keys of a tile: the rows of one warpgroup's product."""


@gluon.jit
def box_shift(box, boxes, head_shift, tail_shift):
    """Return how far a box is shifted: forward to a chunk's first key, or back to end with its last."""
    shift = gl.where(box == 0, head_shift, 0)
    return gl.where((box == boxes - 1) & (tail_shift < 0), tail_shift, shift)


@gluon.jit
def tile_at(step, tiles, SEGMENT: gl.constexpr, ONE_SEGMENT: gl.constexpr):
    """Return ``(tile, whether of values)`` of a step: all keys of a segment of tiles come first, then its values."""
    first = 0
    count = tiles
    if not ONE_SEGMENT:
        first = step // (2 * SEGMENT) * SEGMENT
        count = gl.minimum(tiles - first, SEGMENT)
        step = step - 2 * first
    of_values = step >= count
    return first + gl.where(of_values, step - count, step), of_values


@gluon.jit
def load_pages(table, first, boxes, origin, pages, COUNT: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr):
    """Load the page ids of ``COUNT`` boxes, -1 for those that are none; no other entry of the table is read."""
    loaded = ()
    for i in gl.static_range(COUNT):
        loaded = loaded + (gl.load(table + (origin + (first + i) * BOX) // BLOCK, first + i < boxes, other=-1),)
    ids = ()
    for i in gl.static_range(COUNT):
        ids = ids + (gl.where((loaded[i] >= 0) & (loaded[i] < pages), loaded[i], -1).to(gl.int32),)
    return ids


@gluon.jit
def unknown_boxes(ids, COUNT: gl.constexpr):
    """Return a bit for each box, set where its page is unknown."""
    unknown = gl.to_tensor(0).to(gl.int64)
    for i in gl.static_range(COUNT):
        unknown = unknown | (gl.where(ids[i] < 0, 1, 0).to(gl.int64) << i)
    return unknown


@gluon.jit
def copy_tile(
    cache, ids, tile, origin, boxes, head_shift, tail_shift, kv_head, slots, full, slot,
    FIRST: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's boxes, whose page ids are ``ids[FIRST:]``, into a slot of every piece.

    ``full`` completes when all bytes are there. Triton puts a barrier before every copy, because all of them name that
    one mbarrier; one mbarrier for each piece was not faster.
    """
    BOXES: gl.constexpr = TILE // BOX
    arrival = full.index(slot)
    mbarrier.expect(arrival, TILE * PIECES * PIECE * 2)
    for i in gl.static_range(BOXES):
        box = tile * BOXES + i
        position = origin + box * BOX
        shift = box_shift(box, boxes, head_shift, tail_shift)
        for j in gl.static_range(PIECES):
            target = slots[j].index(slot * BOXES + i)
            if BLOCK == BOX:
                copy_box(
                    cache, [ids[FIRST + i], shift, kv_head, j * PIECE], arrival, target
                )  # fmt: skip
            else:
                copy_box(
                    cache, [ids[FIRST + i], position % BLOCK // BOX, shift, kv_head, j * PIECE], arrival, target
                )  # fmt: skip


@gluon.jit
def copy_step(
    Keys, Values, ids, tile, of_values, origin, boxes, head_shift, tail_shift, kv_head, slots, full, slot,
    BLOCK: gl.constexpr, BOX: gl.constexpr, K_PIECES: gl.constexpr, V_PIECES: gl.constexpr, VALUES_ONLY: gl.constexpr,
):  # fmt: skip
    """Start copying the keys or the values of a tile; ``VALUES_ONLY`` where keys cannot be meant."""
    if VALUES_ONLY or of_values:
        copy_tile(
            Values, ids, tile, origin, boxes, head_shift, tail_shift, kv_head, slots, full, slot, 0, BLOCK, BOX,
            V_PIECES,
        )  # fmt: skip
    else:
        copy_tile(
            Keys, ids, tile, origin, boxes, head_shift, tail_shift, kv_head, slots, full, slot, 0, BLOCK, BOX,
            K_PIECES,
        )  # fmt: skip
