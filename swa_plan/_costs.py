"""What a plan costs: a time for each, from bytes, programs, waves, per-tile latency and the combine.

The model is a sum of terms, each a constant of the device times a number that follows from the plan::

    launch + rounds * (start + tiles * tile) + load * bytes / sm bandwidth + ... + combine

``rounds`` are the turns that a multiprocessor takes until every program ran, ``load`` the programs of the busiest one.
A sum, because a loop that waits for its tiles hides little of their arithmetic, and because constants that enter
linearly can be measured on any GPU by least squares (``swa tune``). The shipped ones come from 16000 timed plans of 169
shapes on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from swa_plan._problem import ITEM_BYTES, Problem
from swa_plan._shapes import ceil_div, head_pieces, next_power_of_two

REFERENCE_DIM, REFERENCE_ROWS = 192, 16
"""Head size and rows that the times of a tile are for."""

UNROLLED_SPLITS = 16
"""Parts that the combine kernel loads at once; further ones it loads one after another."""

_DIM_EXPONENT = 0.15
_QUANTISED_ROUNDING, _LOAD_ROUNDING = 0.5, 0.7
_REGISTERS, _MAX_REGISTERS, _WARPS, _BLOCKS = 65536, 255, 64, 32
_RESERVED_SHARED, _BARRIER_BYTES = 1024, 512


WARPGROUP_CAPABILITIES = (90, 100, 103)


class Tile(NamedTuple):
    """Keys of a tile, warps of a program and stages of its pipeline."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Costs:
    """A device's constants, in microseconds where not said otherwise.

    Attributes:
        launch: of a call, whatever it does.
        start: of a program, until its first keys are there.
        tile_16_2 .. tile_128_8: one step of the loop, by keys and warps, with three stages or more (``_deep``) or two:
            with two, every tile is waited for.
        stream: 100 kB read by one multiprocessor.
        shallow: what is added to that where one program has one tile in flight; half of it for two.
        tall: what is added where a program has more than 16 rows.
        program: each program of the busiest multiprocessor.
        softmax: 100 keys of 16 rows.
        convert_tile: 16 keys a warp of a one-byte cache, before the loop goes on.
        convert: 64 keys of a one-byte cache, for the multiprocessor.
        combine: the second kernel.
        waiting: what the second kernel adds where it starts after the first has ended.
        split: each split that it merges.
        late_split: what each of those beyond ``UNROLLED_SPLITS`` adds.
        partial: a megabyte of partials, written and read.
        rows: 10000 rows times heads that are written.
    """

    launch: float = 0.008
    start: float = 1.609
    tile_16_2_deep: float = 0.496
    tile_16_8_deep: float = 0.501
    tile_32_2: float = 1.058
    tile_32_2_deep: float = 0.717
    tile_32_4_deep: float = 0.554
    tile_32_8_deep: float = 0.602
    tile_64_2: float = 0.933
    tile_64_2_deep: float = 0.679
    tile_64_4: float = 0.352
    tile_64_4_deep: float = 0.435
    tile_128_4: float = 0.185
    tile_128_4_deep: float = 0.272
    tile_128_8_deep: float = 0.662
    stream: float = 1.674
    shallow: float = 2.401
    tall: float = 0.565
    program: float = 1.009
    convert_tile: float = 0.616
    softmax: float = 0.010
    convert: float = 0.119
    combine: float = 0.180
    waiting: float = 1.0
    split: float = 0.027
    late_split: float = 0.349
    partial: float = 0.632
    rows: float = 0.235

    def time_us(self, terms: dict[str, float]) -> float:
        """Return the predicted time of a plan with these terms."""
        return sum(getattr(self, name) * amount for name, amount in terms.items())


COST_NAMES = tuple(each.name for each in fields(Costs))

CANDIDATE_TILES = (
    Tile(16, 2, 4), Tile(16, 2, 6), Tile(16, 8, 3), Tile(32, 2, 2), Tile(32, 2, 3), Tile(32, 2, 4), Tile(32, 4, 3),
    Tile(32, 4, 4), Tile(32, 4, 6), Tile(32, 8, 3), Tile(64, 2, 2), Tile(64, 2, 3), Tile(64, 4, 2), Tile(64, 4, 3),
    Tile(64, 4, 4), Tile(128, 4, 2), Tile(128, 4, 3), Tile(128, 4, 4), Tile(128, 8, 3),
)  # fmt: skip
"""Tiles that won somewhere, or came within 5 %.

All were measured but those with 8 warps and fewer than 128 keys, for chips that have no room for others. One warp is
not among them: at head sizes from 192 on it spills.
"""


FEWEST_KEYS_TILE = Tile(16, 2, 3)
"""For at most 16 keys, where the others would have stages that nothing fills."""


class Program(NamedTuple):
    """What one program of the split kernel takes of a multiprocessor."""

    rows: int
    shared_bytes: int
    registers: int

    def residents(self, tile: Tile, shared_per_sm: int) -> int:
        """Return how many fit on a multiprocessor at a time."""
        registers = max(1, self.registers) * 32 * tile.warps
        most = (shared_per_sm // (self.shared_bytes + _RESERVED_SHARED), _REGISTERS // registers, _WARPS // tile.warps)
        return max(1, min(*most, _BLOCKS))


def padded_rows(problem: Problem, pack: int) -> int:
    """Return the rows of a program's matrix products."""
    return max(16, next_power_of_two(pack * problem.head_tile))


def program_of(problem: Problem, pack: int, tile: Tile) -> Program:
    """Return an estimate of a program's size; registers are a fit to what Triton 3.6 compiles for sm_90."""
    rows = padded_rows(problem, pack)
    dim = max(_width(problem.k_dim), _width(problem.v_dim))
    threads = 32 * tile.warps
    accumulator, scores, addresses = rows * dim / threads, rows * tile.keys / threads, tile.keys * 24 / threads
    registers = 30 + accumulator + 4.5 * addresses * (0.6 + 0.4 * dim / REFERENCE_DIM)
    if rows > 16:
        registers = 1.25 * (registers + scores)
    if problem.quantised:
        registers *= 1.1
    return Program(rows, _operand_bytes(problem, rows, tile), ceil_div(int(registers), 8) * 8)


def fits(problem: Problem, pack: int, tile: Tile, capability: int, shared_memory: int) -> bool:
    """Whether a program with this tile compiles for a chip without spilling, in Triton and in Pallas."""
    program = program_of(problem, pack, tile)
    if program.registers > _MAX_REGISTERS or shared_bytes(problem, program.rows, tile) > shared_memory:
        return False
    if program.rows > 32:
        # Only warpgroups keep such products out of registers, and at larger head sizes they do not either.
        dims, warpgroups = problem.k_dim + problem.v_dim, capability in WARPGROUP_CAPABILITIES
        if warpgroups and dims <= 2 * REFERENCE_DIM:
            return tile.warps == 4 and not faults(problem, program.rows, tile)
        return tile.warps == 8 and tile.keys <= (32 if warpgroups or dims < 2 * REFERENCE_DIM else 16)
    if tile.warps == 8 and tile.keys < 128:
        return False
    if problem.quantised and tile.keys > min(64, 16 * tile.warps):
        return False  # what is converted lies in registers, and the widest tile was never worth it
    return tile.warps >= 2


def faults(problem: Problem, rows: int, tile: Tile) -> bool:
    """Whether Triton 3.6 compiles a kernel for this that may fault.

    Seen on an H200 with an fp8 cache, 64 rows and 64 keys, two and three stages, where launches overlap in a CUDA graph
    (memcheck finds nothing, neither do lone launches); never with 32 keys.
    """
    return problem.quantised and rows > 32 and tile.keys > 32


def shared_bytes(problem: Problem, rows: int, tile: Tile) -> int:
    """Return an upper estimate of a program's shared memory.

    Query, pipelined keys and values, a converted copy of one of them (Pallas makes one), and scratch for the softmax's
    reductions.
    """
    widest = max(_width(problem.k_dim), _width(problem.v_dim))
    converted = tile.keys * widest * ITEM_BYTES[problem.dtype] if problem.quantised else 0
    return _operand_bytes(problem, rows, tile) + converted + rows * tile.keys * 4 + 1024


def _operand_bytes(problem: Problem, rows: int, tile: Tile) -> int:
    """Return the shared memory of the query and of the keys and values in the pipeline."""
    k_width, v_width = _width(problem.k_dim), _width(problem.v_dim)
    pipelined = tile.keys * (k_width + v_width) * ITEM_BYTES[problem.stored_dtype] * (tile.stages - 1)
    return rows * k_width * ITEM_BYTES[problem.dtype] + pipelined + _BARRIER_BYTES


def terms_of(
    problem: Problem, pack: int, splits: int, tile: Tile, *, num_sms: int, shared_per_sm: int, dependent_launch: bool
) -> dict[str, float]:
    """Return what a plan needs of each cost; zeros are left out."""
    requests, tokens = problem.max_requests, problem.max_requests * problem.query_len
    bases = requests * ceil_div(problem.query_len, pack) * problem.kv_heads * problem.head_tiles
    tiles = max(1, ceil_div(problem.row_keys + pack - 1, tile.keys))
    steps = ceil_div(tiles, splits)
    programs = max(1, bases * ceil_div(tiles, steps))
    program = program_of(problem, pack, tile)
    residents = program.residents(tile, shared_per_sm)
    slots, each = num_sms * residents, programs / num_sms
    if programs <= slots:
        rounds, load = 1.0, float(ceil_div(programs, num_sms))
    else:
        full, rest = divmod(programs, slots)
        rounds = _blend(full + (rest > 0), programs / slots, _QUANTISED_ROUNDING)
        load = _blend(full * residents + ceil_div(rest, num_sms), each, _LOAD_ROUNDING)
    in_flight = min(residents, ceil_div(programs, num_sms)) * (tile.stages - 1)
    key_bytes = problem.key_bytes / problem.kv_heads
    read = load * steps * tile.keys * key_bytes / 1e5
    dim = max(_width(problem.k_dim), _width(problem.v_dim)) / REFERENCE_DIM
    terms = {
        "launch": 1.0,
        "start": rounds,
        tile_cost(tile): rounds * steps * dim**_DIM_EXPONENT,
        "stream": read,
        "shallow": read / in_flight,
        "tall": read if program.rows > REFERENCE_ROWS else 0.0,
        "program": load,
        "convert_tile": rounds * steps * tile.keys / 16 / tile.warps * dim if problem.quantised else 0.0,
        "softmax": load * steps * tile.keys / 100 * program.rows / REFERENCE_ROWS,
        "convert": load * steps * tile.keys / 64 * dim if problem.quantised else 0.0,
        "rows": tokens * problem.heads / 1e4,
    }
    if splits > 1:
        terms["combine"], terms["split"] = 1.0, float(splits)
        terms["late_split"] = float(max(0, splits - UNROLLED_SPLITS))
        terms["waiting"] = 0.0 if dependent_launch else 1.0
        terms["partial"] = tokens * splits * problem.heads * problem.v_dim * 4 / 1e6
    return {name: amount for name, amount in terms.items() if amount}


def tile_cost(tile: Tile) -> str:
    """Return the name of a tile's cost."""
    name = f"tile_{tile.keys}_{tile.warps}"
    return name if tile.stages == 2 and name in COST_NAMES else name + "_deep"


def _width(dim: int) -> int:
    piece, pieces = head_pieces(dim)
    return piece * pieces


def _blend(quantised: float, smooth: float, share: float) -> float:
    return share * quantised + (1 - share) * smooth
