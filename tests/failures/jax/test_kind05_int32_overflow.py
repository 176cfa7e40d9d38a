"""Kind 5 of the known failures, in JAX: offsets beyond 2**31 elements. Small pools never see them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_pallas
from tests.contract.jax_runner import HAS_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="JAX sees no CUDA device")]

PAGES = 43_700
LAYERED_PAGES = 920


def random(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def attend(query: jax.Array, cache: object, first_page: int, lens: jax.Array, **options: object) -> np.ndarray:
    """Return the attention to 4 pages from ``first_page`` on."""
    table = first_page + jnp.arange(4, dtype=jnp.int32)[None, :]
    return np.asarray(swa_pallas.swa_decode(query, cache, table, lens, window=512, **options)).astype(np.float32)


@pytest.mark.parametrize("layout", ["pages kv block kv_heads dim", "pages block kv_heads (kv dim)"])
def test_high_pages_of_one_pool(layout):
    """C34, vllm-project/vllm#47671, and C36, vllm-project/vllm#50427: page * page stride wraps at page 43691."""
    shape = (2, 16, 8, 192) if "dim)" not in layout else (16, 8, 384)
    assert 43_691 * int(np.prod(shape)) > 2**31 - 1
    data = random((4, *shape), 0)
    pool = jnp.zeros((PAGES, *shape), jnp.bfloat16)
    write = jax.jit(lambda pool, at: jax.lax.dynamic_update_slice_in_dim(pool, data, at, 0), donate_argnums=0)
    pool = write(write(pool, 0), PAGES - 4)
    cache = swa_pallas.PagedCache(pool, layout)
    query, lens = random((1, 96, 192), 1), jnp.array([64], jnp.int32)
    low = attend(query, cache, 0, lens)
    assert np.abs(low).max() > 0
    np.testing.assert_array_equal(attend(query, cache, PAGES - 4, lens), low)
    key, value = random((1, 8, 192), 2), random((1, 8, 192), 3)
    last = jnp.array([PAGES * 16 - 1], jnp.int32)
    appended = jax.jit(lambda cache: swa_pallas.append(cache, key, value, last), donate_argnums=0)(cache)
    tail = np.asarray(appended.bases[0][PAGES - 1]).astype(np.float32)
    slot = tail[:, 15] if tail.ndim == 4 else np.stack(np.split(tail[15], 2, axis=-1))
    np.testing.assert_array_equal(slot, np.stack([np.asarray(rows[0]).astype(np.float32) for rows in (key, value)]))
    np.testing.assert_array_equal(attend(query, appended, 0, lens), low)


def test_high_pages_of_a_pool_of_all_layers():
    """C39, vllm-project/vllm-xpu-kernels#445: 48 layers in a page wrap at page 911."""
    shape = (48, 2, 16, 8, 192)
    assert 911 * int(np.prod(shape)) > 2**31 - 1
    data = random((4, *shape[1:]), 0)
    pool = jnp.zeros((LAYERED_PAGES, *shape), jnp.bfloat16)
    pool = jax.jit(lambda pool: pool.at[LAYERED_PAGES - 4 :, 47].set(data), donate_argnums=0)(pool)
    cache = swa_pallas.PagedCache(pool, "pages layers kv block kv_heads dim")
    query, lens = random((1, 96, 192), 1), jnp.array([64], jnp.int32)
    expected = attend(query, swa_pallas.PagedCache(data, "pages kv block kv_heads dim"), 0, lens)
    assert np.abs(expected).max() > 0
    for layer in (47, jnp.int32(47)):
        np.testing.assert_array_equal(attend(query, cache, LAYERED_PAGES - 4, lens, layer=layer), expected)
