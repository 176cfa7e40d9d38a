"""What the Hopper kernel takes and needs: which problems, how many rows, boxes, tiles and bytes of shared memory.

Its products have keys on the side of 64 rows, its tiles are copied in boxes of consecutive slots of a page, and the
logits of a segment of tiles stay in registers.
"""

from __future__ import annotations

from swa_plan._device import DeviceProfile
from swa_plan._problem import ITEM_BYTES, Problem
from swa_plan._shapes import ceil_div, next_power_of_two

HOPPER_CAPABILITY = 90
"""Later chips have no warpgroup products of this kind."""

HOPPER_TILE, HOPPER_PIECE, HOPPER_GRANULE = 64, 64, 16
"""Keys of a tile, elements of a piece of a head, and the keys that chunks are multiples of."""

LEAST_BOX = 16
_PACKED_ROWS, _MOST_SPLITS, _LONGEST_CHUNK = 32, 8, 528
_QUEUE = 8
"""Programs for each multiprocessor that make a queue; on an H200 four were none yet, and sixteen were one."""

_RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps for itself of each program's."""

_LEAST_DIM = 64
_MOST_BOXES = 64
"""Of one segment that is a whole chunk: a bit of a 64-bit number says whether a box's page is known."""

MOST_TILES = {8: 17, 16: 17, 32: 10, 64: 10}
"""Tiles by rows that a program can take at a time, where they are all that it takes: so many logits fit into a thread's
registers without spilling, until values come."""

SEGMENT_TILES = {8: 12, 16: 8, 32: 8, 64: 1}
"""The same where it takes several segments, and the sums of those before live on beside the logits.

Two cases spill up to 104 bytes a thread and are taken all the same, because fewer tiles would cost calls without a
softcap: a softcap with heads wider than 192 here, and all options of a call at once with 64 rows above.
"""


def why_not_hopper(problem: Problem) -> str | None:
    """Return why the Hopper kernel cannot run a problem, None if it can."""
    if problem.quantised or problem.dtype == "float32":
        return f"it takes caches of 16-bit values in the query's dtype, not {problem.stored_dtype}"
    if min(problem.k_dim, problem.v_dim) < _LEAST_DIM:
        return f"it takes head sizes from {_LEAST_DIM} on, not {problem.k_dim}/{problem.v_dim}"
    if box_of(problem.block) < LEAST_BOX:
        return f"it takes pages of a multiple of {LEAST_BOX} tokens, not {problem.block}"
    return None


def box_of(block: int) -> int:
    """Return the consecutive slots of a page that one copy takes: the largest power of two that divides the page."""
    return min(HOPPER_TILE, block & -block)


def hopper_rows(problem: Problem, pack: int) -> int:
    """Return the rows of a program's products, padded to a power of two of at least 8."""
    return max(8, next_power_of_two(pack * problem.head_tile))


def chunk_tiles(problem: Problem, pack: int, splits: int) -> int:
    """Return the most tiles that a chunk touches; boxes start at absolute multiples, a chunk anywhere."""
    granules = ceil_div(max(1, problem.row_keys + pack - 1), HOPPER_GRANULE)
    chunk = ceil_div(granules, splits) * HOPPER_GRANULE
    return ceil_div(chunk + box_of(problem.block) - 1, HOPPER_TILE)


def segment_tiles(problem: Problem, pack: int, splits: int) -> int:
    """Return the tiles that a program takes at a time: all of its chunk, or as many as registers hold."""
    rows = hopper_rows(problem, pack)
    tiles = chunk_tiles(problem, pack, splits)
    if tiles <= min(MOST_TILES[rows], _MOST_BOXES * box_of(problem.block) // HOPPER_TILE):
        return tiles
    return ceil_div(tiles, ceil_div(tiles, SEGMENT_TILES[rows]))


def hopper_shared_bytes(problem: Problem, pack: int, splits: int, stages: int) -> int:
    """Return a program's shared memory: ring, query and weights of a segment, reductions over four warps, barriers.

    Where one segment is all, its weights take the place of the query.
    """
    rows = hopper_rows(problem, pack)
    k_pieces, v_pieces = ceil_div(problem.k_dim, HOPPER_PIECE), ceil_div(problem.v_dim, HOPPER_PIECE)
    segment = segment_tiles(problem, pack, splits)
    whole = segment == chunk_tiles(problem, pack, splits)
    tiles = max(segment, k_pieces) if whole else segment + k_pieces
    slot = max(k_pieces, v_pieces) * HOPPER_TILE
    elements = (stages * slot + tiles * rows) * HOPPER_PIECE
    return elements * ITEM_BYTES[problem.dtype] + 4 * rows * ITEM_BYTES["float32"] + 256


def hopper_choice(problem: Problem, device: DeviceProfile) -> tuple[int, int, int, int, int]:
    """Return ``(pack, splits, tile, warps, stages)``: splits that give each multiprocessor one program, and no more.

    Rows are packed up to 32 first. With 16 requests of 4 rows and 16 heads, two programs a multiprocessor or packing
    all 64 rows took 11.4 and 11.6 us on an H200, one program of 32 rows 10.0 us.
    """
    most = min(problem.query_len, max(1, _PACKED_ROWS // problem.group))
    pack = ceil_div(problem.query_len, ceil_div(problem.query_len, most))
    programs = problem.max_requests * ceil_div(problem.query_len, pack) * problem.kv_heads * problem.head_tiles
    keys = problem.row_keys + pack - 1
    splits = min(device.num_sms // max(1, programs), _MOST_SPLITS, keys // HOPPER_TILE)
    splits = max(1, splits, min(ceil_div(keys, _LONGEST_CHUNK), _MOST_SPLITS))
    granules = ceil_div(max(1, keys), HOPPER_GRANULE)
    splits = ceil_div(granules, ceil_div(granules, splits))  # none without keys
    stages = _ring(problem, device, pack, splits, programs * splits)
    return pack, splits, HOPPER_TILE, hopper_warps(problem, pack, splits), stages


def hopper_warps(problem: Problem, pack: int, splits: int = 1) -> int:
    """Return a program's warps: one warpgroup, or two for the logits of more than 16 rows and four tiles.

    More than 32 rows spill from one. 32 rows of ten tiles do not, and still took 31.1 us on an H200 in place of 30.8.
    """
    rows = hopper_rows(problem, pack)
    return 8 if rows > 32 or (rows > 16 and chunk_tiles(problem, pack, splits) > 4) else 4


def _ring(problem: Problem, device: DeviceProfile, pack: int, splits: int, programs: int) -> int:
    """Return the stages of each program's ring: three in general, and no more than fit.

    A chunk of up to two tiles gets a stage for each of its copies, so that none waits for another. Where programs queue
    and a ring of two lets a multiprocessor hold one more of them, that one hides where others start and end: 2048
    programs took 192.3 us on an H200 in place of 193.5. 512 took 53.4 us in place of 52.2.
    """

    def residents(stages: int) -> int:
        return device.shared_per_sm // (hopper_shared_bytes(problem, pack, splits, stages) + _RESERVED_BYTES)

    tiles = chunk_tiles(problem, pack, splits)
    stages = 2 * tiles if tiles <= 2 else 3
    if programs >= _QUEUE * device.num_sms and residents(2) > residents(stages):
        return 2
    while stages > 2 and hopper_shared_bytes(problem, pack, splits, stages) > device.shared_memory:
        stages -= 1
    return stages
