"""The shape of a decode step, validated once.

A ``Problem`` holds everything that planning may depend on and nothing that lives on a device, so that a plan can be
made inside a graph capture or while JAX traces.
"""

from __future__ import annotations

from dataclasses import dataclass

from swa_plan._checks import check_head_dim, check_heads, check_integer, check_window
from swa_plan._shapes import ceil_div

QUERY_DTYPES = ("bfloat16", "float16", "float32")
QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

MAX_ROWS = {"bfloat16": 64, "float16": 64, "float32": 32}
"""Rows (packed query rows times heads) that one program takes: more do not fit in registers and shared memory."""

MAX_POSITIONS = 1 << 30
"""Positions are 32-bit in the kernels; a table may address at most this many."""


@dataclass(frozen=True)
class Problem:
    """One decode step's static shape.

    Attributes:
        max_requests: most requests a step has.
        heads: query heads; query head ``h`` reads kv head ``h // group``.
        kv_heads: heads of the cache.
        k_dim: head size of queries and keys, a multiple of 16 up to 256.
        v_dim: head size of values and outputs, likewise.
        window: keys a row sees, its own position included; None for full causal attention.
        block: tokens in a page.
        max_blocks: most columns of a block table.
        query_len: rows of each request, or their upper bound where rows are ragged.
        dtype: name of the query's dtype, which is the compute dtype.
        cache_dtype: name of the cache's dtype; None means ``dtype``.
        ragged: whether rows come with ``cu_query_lens``.
        max_tokens: most query rows, padding included; None means ``max_requests * query_len``.
    """

    max_requests: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    block: int
    max_blocks: int
    query_len: int = 1
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    ragged: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = check_heads(self.heads, self.kv_heads)
        checked = {
            "max_requests": check_integer("max_requests", self.max_requests, minimum=0),
            "heads": heads,
            "kv_heads": kv_heads,
            "k_dim": check_head_dim("k_dim", self.k_dim),
            "v_dim": check_head_dim("v_dim", self.v_dim),
            "window": check_window(self.window),
            "block": check_integer("block", self.block, minimum=1),
            "max_blocks": check_integer("max_blocks", self.max_blocks, minimum=0),
            "query_len": check_integer("query_len", self.query_len, minimum=1),
        }
        for name, value in checked.items():  # as plain ints, which a plan can serialise
            object.__setattr__(self, name, value)
        if self.block * self.max_blocks > MAX_POSITIONS:
            raise ValueError(
                f"block * max_blocks must be at most {MAX_POSITIONS} positions, "
                f"got {self.block} * {self.max_blocks} = {self.block * self.max_blocks}"
            )
        if self.dtype not in QUERY_DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(QUERY_DTYPES)}, got {self.dtype!r}")
        if self.cache_dtype is None:
            object.__setattr__(self, "cache_dtype", self.dtype)
        if self.cache_dtype != self.dtype and self.cache_dtype not in QUANTISED_DTYPES:
            raise TypeError(
                f"cache_dtype must be the query's dtype ({self.dtype}) or one of {', '.join(QUANTISED_DTYPES)}, "
                f"got {self.cache_dtype!r}"
            )
        uniform_tokens = self.max_requests * self.query_len
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", uniform_tokens)
        object.__setattr__(self, "max_tokens", check_integer("max_tokens", self.max_tokens, minimum=0))
        if not self.ragged and self.max_tokens != uniform_tokens:
            raise ValueError(
                f"max_tokens must be max_requests * query_len = {uniform_tokens} where rows are uniform, "
                f"got {self.max_tokens}"
            )

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def head_tiles(self) -> int:
        """Programs that share one kv head's group, where it has more heads than one program's matrix products take."""
        return ceil_div(self.group, MAX_ROWS[self.dtype])

    @property
    def head_tile(self) -> int:
        """Query heads of a group that one program takes."""
        return ceil_div(self.group, self.head_tiles)

    @property
    def stored_dtype(self) -> str:
        """Name of the dtype that the cache stores."""
        return self.cache_dtype or self.dtype

    @property
    def quantised(self) -> bool:
        """Whether a stored value means ``stored * scale``."""
        return self.stored_dtype != self.dtype

    @property
    def capacity(self) -> int:
        """Positions that the block table can address."""
        return self.block * self.max_blocks

    @property
    def row_keys(self) -> int:
        """Most keys that one row sees."""
        return self.capacity if self.window is None else min(self.window, self.capacity)

    @property
    def nominal_keys(self) -> int:
        """Most keys that all rows of a request see together: the range that is split."""
        return self.row_keys + self.query_len - 1

    @property
    def key_bytes(self) -> int:
        """Bytes of one position's key and value, all kv heads."""
        return self.kv_heads * (self.k_dim + self.v_dim) * ITEM_BYTES[self.stored_dtype]
