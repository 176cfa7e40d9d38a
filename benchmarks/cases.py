"""One case of the bench: a decode step's shape with the length of each request, and exactly the bytes that it reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Case:
    """A decode step in bf16.

    Attributes:
        name: unique name.
        suite: the group of cases it belongs to.
        seq_lens: keys of each request, its query rows included.
        kv_heads: heads of the cache.
        group: query heads a kv head.
        k_dim: head size of keys.
        v_dim: head size of values.
        window: keys that a row sees, its own included.
        query_len: rows of each request.
        block: tokens in a page.
        gate: whether each head has a sigmoid gate.
        sinks: whether each head has a sink logit.
        softcap: cap of the logits, or None.
        family: cases that differ only in batch size, or only in context, share one: a line of a plot.
        columns: of the block table; 0: as many as the longest request needs.
    """

    name: str
    suite: str
    seq_lens: tuple[int, ...]
    kv_heads: int
    group: int
    k_dim: int = 192
    v_dim: int = 192
    window: int = 512
    query_len: int = 1
    block: int = 64
    gate: bool = True
    sinks: bool = False
    softcap: float | None = None
    family: str = ""
    columns: int = 0

    def __post_init__(self) -> None:
        if not self.seq_lens or min(self.seq_lens) < self.query_len:
            raise ValueError(f"seq_lens must hold at least query_len={self.query_len} keys each, got {self.seq_lens}")

    @property
    def requests(self) -> int:
        """Requests of the step."""
        return len(self.seq_lens)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def tokens(self) -> int:
        """Query rows of the step."""
        return self.requests * self.query_len

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return max(self.columns, -(-max(self.seq_lens) // self.block))

    @property
    def live_keys(self) -> int:
        """Keys that some row of their request sees, over all requests."""
        return sum(min(seq_len, self.window + self.query_len - 1) for seq_len in self.seq_lens)

    @property
    def read_bytes(self) -> int:
        """Bytes of the live keys and values."""
        return self.live_keys * self.kv_heads * (self.k_dim + self.v_dim) * BFLOAT16_BYTES

    @property
    def shape(self) -> str:
        """The shape in a few words."""
        shortest, longest = min(self.seq_lens), max(self.seq_lens)
        dims = str(self.k_dim) if self.k_dim == self.v_dim else f"{self.k_dim}/{self.v_dim}"
        words = [
            f"{self.requests} x {self.kv_heads} x {self.group}" + (f", {self.query_len} rows" * (self.query_len > 1)),
            f"head {dims}",
            f"window {self.window}",
            f"keys {longest}" if shortest == longest else f"keys {shortest}-{longest}",
            *(name for name in ("gate", "sinks") if getattr(self, name)),
        ]
        return ", ".join(words if self.softcap is None else [*words, f"softcap {self.softcap:g}"])

    def to_json(self) -> dict[str, Any]:
        """Return the case and what follows from it."""
        return {**asdict(self), "seq_lens": list(self.seq_lens), "read_bytes": self.read_bytes, "shape": self.shape}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """Return the case that ``to_json`` wrote."""
        known = {each.name: values[each.name] for each in fields(cls)}
        return cls(**{**known, "seq_lens": tuple(known["seq_lens"])})
