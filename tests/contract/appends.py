"""What the tests of ``append`` write, and into what: NumPy bases and rows of every dtype and layout."""

import numpy as np

from swa_plan import CacheLayout
from swa_plan._dtypes import numpy_dtype

PAGES, BLOCK, KV_HEADS, DIM = 5, 4, 2, 32
SLOTS = PAGES * BLOCK


def make_bases(layout, dtype, *, k_dim=DIM, v_dim=DIM, layers=3, seed=0):
    """Return NumPy bases with every slot filled."""
    parsed = CacheLayout.parse(layout)
    shapes = parsed.shape(
        pages=PAGES, block=BLOCK, kv_heads=KV_HEADS, k_dim=k_dim, v_dim=v_dim,
        layers=layers if parsed.has_layers else None,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    return tuple((8 * rng.standard_normal(shape, np.float32)).astype(numpy_dtype(dtype)) for shape in shapes)


def make_rows(dtype, rows=6, *, k_dim=DIM, v_dim=DIM, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(
        (4 * rng.standard_normal((rows, KV_HEADS, dim), np.float32)).astype(numpy_dtype(dtype))
        for dim in (k_dim, v_dim)
    )
