"""A plan: how one decode step is cut into programs, and the planner that chooses it.

A program owns one kv head (or a tile of at most 64 of its query heads), ``pack`` consecutive rows of one request and
one of ``splits`` chunks of that request's live keys. The planner is plain Python and never reads device data, so that
it works in a graph capture and at trace time; both frameworks take their numbers from a ``Plan`` and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace

from swa_plan._checks import check_integer
from swa_plan._choose import MAX_PACKED_ROWS, choices, choose_tile
from swa_plan._costs import padded_rows
from swa_plan._device import DeviceProfile
from swa_plan._hopper import HOPPER_CAPABILITY, HOPPER_GRANULE, hopper_choice, hopper_rows, why_not_hopper
from swa_plan._problem import Problem
from swa_plan._shapes import ceil_div
from swa_plan._tiles import invariant_tile

KERNELS = ("portable", "hopper", "ops", "interpret")
MAX_SPLITS = 65535
"""CUDA's limit for the second axis of a grid."""

_ALIGNMENT = 256
_INVARIANT_CHUNK = 128
_INVARIANT_CHUNKS = 32


@dataclass(frozen=True)
class Plan:
    """How one decode step runs. Frozen, hashable, made of integers and strings.

    Attributes:
        problem: the shape that this plan serves; any batch up to ``problem.max_requests``.
        kernel: ``portable`` (Triton; Pallas lowered through Triton), ``hopper`` (Gluon, sm_90), ``ops`` (plain
            framework operations) or ``interpret`` (the portable kernel, interpreted on the CPU).
        pack: consecutive rows of a request that one program takes.
        splits: chunks that a request's live keys are cut into.
        tile: keys that one step of a program's loop takes, a power of two.
        warps: warps of a program.
        stages: depth of the loop's software pipeline.
        chunk: keys of a chunk cut at absolute multiples, for batch-invariant plans; 0 cuts each request's live range
            evenly.
        device: name of the device that the plan was made for.
        text: the plan as JSON.
    """

    problem: Problem
    kernel: str
    pack: int
    splits: int
    tile: int
    warps: int
    stages: int
    chunk: int = 0
    device: str = ""
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
        for name, least, most in (
            ("splits", 1, MAX_SPLITS),
            ("pack", 1, self.problem.query_len),
            ("tile", 16, None),
            ("warps", 1, None),
            # With one, triton 3.6 compiles a kernel for sm_90 that may fault (seen with 128 keys of an fp8 cache).
            ("stages", 2, None),
            ("chunk", 0, None),
        ):
            # Stored again as an int: NumPy's integers are no JSON.
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=least, maximum=most))
        check_pack(self.problem, self.pack)
        for name, value in (("tile", self.tile), ("warps", self.warps)):
            if value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.chunk % self.tile:
            raise ValueError(f"chunk must be a multiple of tile, got chunk={self.chunk} and tile={self.tile}")
        if self.chunk and self.splits < chunks_touched(self.problem, self.pack, self.chunk):
            raise ValueError(
                f"splits must be at least {chunks_touched(self.problem, self.pack, self.chunk)} to cover chunks of "
                f"{self.chunk} keys, got {self.splits}"
            )
        # Serialised once, so that a traced call finds its plan as a constant.
        values = asdict(self)
        del values["text"]
        object.__setattr__(self, "text", json.dumps(values, sort_keys=True))

    @classmethod
    def from_splits(cls, problem: Problem, splits: int, pack: int = 1, *, device: DeviceProfile | None = None) -> Plan:
        """Return a plan with ``splits`` and ``pack`` given, under the original kernel's rule.

        ``device`` chooses the tile; None takes one that fits every GPU from sm_80 on.

        Raises:
            ValueError: ``query_len`` is not a multiple of ``pack``, or ``pack * group > 64`` with ``pack > 1``.
        """
        check_integer("splits", splits, minimum=1, maximum=MAX_SPLITS)
        check_integer("pack", pack, minimum=1)
        if problem.query_len % pack:
            raise ValueError(f"query_len must be a multiple of pack, got query_len={problem.query_len} and pack={pack}")
        check_pack(problem, pack)
        profile = DeviceProfile.named("rtx4090") if device is None else device
        return cls(problem, "portable", pack, splits, *choose_tile(problem, pack, splits, profile), device=profile.name)

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's bits are independent of everything else in the batch."""
        return self.chunk > 0

    @property
    def rows(self) -> int:
        """Rows of a program's matrix products, padded to a power of two of at least 16."""
        return padded_rows(self.problem, self.pack)

    @property
    def runs_hopper(self) -> bool:
        """Whether the Hopper kernel takes this plan, as far as its shape decides."""
        return self.kernel == "hopper" and self.why_handed_over is None

    @property
    def why_handed_over(self) -> str | None:
        """Why kernel ``hopper`` hands this plan to the portable kernel; None where it does not, and for others."""
        if self.kernel != "hopper":
            return None
        if self.batch_invariant:
            return "it does not cut chunks at absolute positions"
        return why_not_hopper(self.problem)

    @property
    def granule(self) -> int:
        """Keys that chunks are whole multiples of."""
        return HOPPER_GRANULE if self.runs_hopper else self.tile

    @property
    def row_tiles(self) -> int:
        """Programs that share one request's rows."""
        return ceil_div(self.problem.query_len, self.pack)

    def programs(self, requests: int) -> int:
        """Return the programs of a batch, before splitting."""
        return requests * self.row_tiles * self.problem.kv_heads * self.problem.head_tiles

    def workspace_layout(self, tokens: int) -> tuple[int, int]:
        """Return ``(offset of the partial LSEs, total bytes)`` of the workspace for a batch of ``tokens`` rows.

        The workspace holds fp32 partials ``[tokens, splits, heads, v_dim]``, then their fp32 base-2 LSEs
        ``[tokens, splits, heads]``; it is empty where ``splits`` is 1.
        """
        if self.splits == 1:
            return 0, 0
        rows = tokens * self.splits * self.problem.heads
        partials = ceil_div(rows * self.problem.v_dim * 4, _ALIGNMENT) * _ALIGNMENT
        return partials, partials + rows * 4

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that serve every batch of this plan."""
        assert self.problem.max_tokens is not None
        return self.workspace_layout(self.problem.max_tokens)[1]

    def check_serves(self, problem: Problem) -> None:
        """Check that this plan serves a call of shape ``problem``.

        Raises:
            ValueError: naming the first field that does not fit.
        """
        mine = self.problem
        for one in fields(Problem):
            planned, called = getattr(mine, one.name), getattr(problem, one.name)
            if one.name in ("max_requests", "max_blocks", "max_tokens"):
                if called > planned:
                    raise ValueError(f"plan was made for {one.name} up to {planned}, got {called}")
            elif planned != called:
                raise ValueError(f"plan was made for {one.name}={planned!r}, got {called!r}")

    def to_json(self) -> str:
        """Return the plan as one JSON object."""
        return self.text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Raises:
            ValueError: ``text`` is not such an object.
        """
        try:
            values = json.loads(text)
            return cls(**{**values, "problem": Problem(**values["problem"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"text must be a plan as to_json writes it, got {text[:80]!r} ({error})") from error

    def explain(self) -> str:
        """Return a few lines that say what this plan does and why."""
        problem = self.problem
        requests = problem.max_requests
        keys = problem.nominal_keys
        rows = hopper_rows(problem, self.pack) if self.runs_hopper else self.rows
        lines = [
            f"kernel {self.kernel} on {self.device or 'any device'}",
            f"{problem.heads} query heads over {problem.kv_heads} kv heads (group {problem.group}), head size "
            f"{problem.k_dim}/{problem.v_dim}, window {problem.window}, {problem.query_len} row(s) a request",
            f"pack {self.pack}: a program takes {self.pack} row(s) x {problem.head_tile} heads "
            f"= {self.pack * problem.head_tile} of {rows} matrix rows",
            f"splits {self.splits}: {keys} live keys at most, "
            + (
                f"chunks of {self.chunk} keys cut at absolute positions (batch-invariant)"
                if self.batch_invariant
                else f"about {ceil_div(ceil_div(keys, self.granule), self.splits) * self.granule} keys a program"
            ),
            f"tile {self.tile} keys, {self.warps} warps, {self.stages} stages",
            f"{self.programs(requests)} x {self.splits} programs at {requests} requests, "
            f"{self.workspace_bytes} bytes of workspace",
            f"reads {requests * min(keys, problem.capacity) * problem.key_bytes} bytes of keys and values at most",
        ]
        if self.why_handed_over is not None:
            lines[0] += f", which hands this plan to the portable kernel: {self.why_handed_over}"
        return "\n".join(lines)


def plan(
    problem: Problem,
    device: DeviceProfile,
    *,
    kernel: str | None = None,
    batch_invariant: bool = False,
    dependent_launch: bool = True,
) -> Plan:
    """Choose a plan from shapes alone.

    Args:
        problem: the step's shape.
        device: what the step runs on.
        kernel: ``portable``, ``hopper``, ``ops`` or ``interpret``; None takes ``portable`` on a GPU and ``ops`` on a
            CPU. ``hopper`` hands the problems that it does not take, and batch-invariant plans, to ``portable``.
        batch_invariant: choose from (row bound, heads, dims, dtype, window, table width) alone, so that a request's
            bits do not depend on the batch it is in.
        dependent_launch: for ``portable``, whether a kernel starts while the one before it ends, as Triton's do (CUDA's
            programmatic dependent launch) and XLA's do not. A batch-invariant plan is the same for both.

    Returns:
        The plan. Algorithm: split-KV decoding (Dao et al., "Flash-Decoding", 2023), splitting the live window only.

    Raises:
        ValueError: no such kernel for this device.
    """
    if kernel is None:
        kernel = "portable" if device.capability else "ops"
    if kernel == "portable" and not device.capability:
        raise ValueError(f"kernel 'portable' needs a GPU, got device {device.name!r}")
    if kernel == "hopper" and device.capability != HOPPER_CAPABILITY:
        raise ValueError(f"kernel 'hopper' needs an sm_{HOPPER_CAPABILITY} GPU, got device {device.name!r}")
    profile = device if device.capability else DeviceProfile.named("h200")
    if batch_invariant:
        return _invariant_plan(problem, profile, kernel, device.name)
    if kernel == "hopper" and why_not_hopper(problem) is None:
        return Plan(problem, kernel, *hopper_choice(problem, device), device=device.name)
    best = choices(problem, profile, dependent_launch=dependent_launch or kernel != "portable")[0]
    return Plan(problem, kernel, best.pack, best.splits, *best.tile, device=device.name)


def check_pack(problem: Problem, pack: int) -> None:
    """Check the original kernel's rule for packed rows.

    Raises:
        ValueError: ``pack * group > 64`` with ``pack > 1``.
    """
    if pack > 1 and pack * problem.group > MAX_PACKED_ROWS:
        raise ValueError(
            f"pack * group must be at most {MAX_PACKED_ROWS} (or pack 1), got pack={pack} and group={problem.group}"
        )


def chunks_touched(problem: Problem, pack: int, chunk: int) -> int:
    """Return the most chunks, cut at absolute multiples, that the keys of ``pack`` rows lie in."""
    return min(max(1, ceil_div(problem.capacity, chunk)), (problem.row_keys + pack - 3) // chunk + 2)


def _invariant_plan(problem: Problem, device: DeviceProfile, kernel: str, device_name: str) -> Plan:
    """Plan from a request's own shape, with chunks at absolute positions.

    A row's chunks are then the same whatever its neighbours, ``query_len`` and ``pack``; packing never widens the
    padded matrix, because a wider one may sum in another order.
    """
    single = replace(problem, max_requests=1, query_len=1, max_tokens=None, ragged=False)
    pack = min(problem.query_len, max(1, padded_rows(single, 1) // problem.group))
    tile = invariant_tile(single, device)
    chunk = max(_INVARIANT_CHUNK, ceil_div(problem.row_keys, _INVARIANT_CHUNKS))
    chunk = ceil_div(chunk, tile.keys) * tile.keys
    # Never 1 where another query_len would need 2: with one split the sums are finished in another order.
    splits = min(max(1, ceil_div(problem.capacity, chunk)), max(2, chunks_touched(problem, pack, chunk)))
    return Plan(problem, kernel, pack, splits, *tile, chunk=chunk, device=device_name)
