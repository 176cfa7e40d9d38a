"""Small decode steps as JAX arrays, bits, and what compiled code says: shared by the tests of this folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from swa_pallas import PagedCache
from swa_plan import CacheLayout
from swa_plan._dtypes import numpy_dtype
from swa_plan._layout import LAYOUTS

HAS_GPU = jax.default_backend() == "gpu"
BACKENDS = ("xla", "interpret")
"""What runs on the CPU."""

LAYERED = tuple(
    layered for layout in LAYOUTS for layered in (f"layers {layout}", layout.replace("pages", "pages layers", 1))
)
ALL_LAYOUTS = (*LAYOUTS, *LAYERED)
LAYERS = 3
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
TRITON_CALL = "__gpu$xla.gpu.triton"


class Step(NamedTuple):
    """One decode step: ``swa_decode(*step, window=...)``."""

    query: Any
    cache: PagedCache
    block_table: Any
    seq_lens: Any


def make_cache(
    layout: str = "pages block kv_heads dim", *, pages: int = 14, block: int = 16, kv_heads: int = 2, k_dim: int = 32,
    v_dim: int = 32, layers: int = LAYERS, dtype: str = "float32", seed: int = 0,
) -> PagedCache:  # fmt: skip
    """Return a cache with a random number in every slot; ``layers`` counts where the layout has them."""
    parsed = CacheLayout.parse(layout)
    shapes = parsed.shape(
        pages=pages, block=block, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim,
        layers=layers if parsed.has_layers else None,
    )  # fmt: skip
    bases = tuple(normal(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes))
    return PagedCache(bases if len(bases) == 2 else bases[0], layout, k_dim=k_dim, v_dim=v_dim)


def make_step(
    seq_lens: tuple[int, ...] = (20, 5, 0, 33), *, query_len: int = 1, tokens: int | None = None, heads: int = 4,
    kv_heads: int = 2, k_dim: int = 32, v_dim: int = 32, block: int = 16, max_blocks: int = 3,
    layout: str = "pages block kv_heads dim", dtype: str = "float32", cache_dtype: str | None = None, seed: int = 0,
) -> Step:  # fmt: skip
    """Return a step with random data, each request owning ``max_blocks`` shuffled pages, and two pages to spare."""
    requests = len(seq_lens)
    pages = requests * max_blocks + 2
    cache = make_cache(
        layout, pages=pages, block=block, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, dtype=cache_dtype or dtype,
        seed=seed + 10,
    )  # fmt: skip
    table = np.random.default_rng(seed).permutation(pages)[: requests * max_blocks].reshape(requests, max_blocks)
    query = normal(requests * query_len if tokens is None else tokens, heads, k_dim, dtype=dtype, seed=seed + 20)
    return Step(query, cache, jnp.asarray(table.astype(np.int32)), jnp.asarray(np.array(seq_lens, np.int32)))


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Return normal numbers that depend on the seed alone."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    if dtype == "int8":
        numbers = np.rint(numbers * 40).clip(-127, 127)
    return jnp.asarray(numbers.astype(numpy_dtype(dtype)))


def specs(tree: Any) -> Any:
    """Return the ``ShapeDtypeStruct``s of a tree of arrays."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays are bitwise equal."""
    ones, others = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (a, b))
    return len(ones) == len(others) and all(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for one, other in zip(ones, others, strict=True)
    )


def size_of(cache: PagedCache) -> int:
    """Return a cache's bytes."""
    return sum(base.size * base.dtype.itemsize for base in cache.bases)


@contextlib.contextmanager
def cuda_target() -> Iterator[None]:
    """Lower for an H200 in here; a JAX that can name devices abstractly insists on it where there is no GPU."""
    if HAS_GPU:
        yield
        return
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H200)):
        yield


def lower_for_cuda(function: Callable[..., Any], *args: Any, **jit_options: Any) -> str:
    """Return the StableHLO of a function for an H200."""
    with cuda_target():
        return jax.jit(function, **jit_options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def compile_here(function: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
    """Return the function compiled for this process's default device."""
    return jax.jit(function, **jit_options).lower(*args).compile()


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Return the instructions of compiled HLO that copy or transpose an array of this shape."""
    sizes = re.escape(",".join(map(str, shape)))
    return re.findall(rf"= \w+\[{sizes}\]\S* (?:copy|copy-start|transpose)\(.*", hlo)
