"""Rounding inside XLA programs, which may drop or reorder what it takes for no-ops: bit for bit as NumPy rounds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swa_pallas._pallas._backend import divide
from swa_pallas._xla import rounded


def numbers():
    """Return numbers of every magnitude that 16 bits hold, their subnormals and the ties between those."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 15, 4000)
    ties = (np.arange(-64, 64) + 0.5) * 2.0**-24
    return np.concatenate([spread, ties, [0.0, -0.0, 2.0**-14, 2.0**-25]]).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rounded_is_a_cast_there_and_back(dtype):
    x = numbers()
    found = jax.jit(lambda x: rounded(x * 2.0, jnp.dtype(dtype)))(x / 2)
    np.testing.assert_array_equal(np.asarray(found), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("scale", [0.03, 0.37, 3.0])
def test_a_quotient_by_one_number_is_rounded_once(scale):
    x, scale = numbers(), np.float32(scale)
    found = jax.jit(lambda x, scale: divide(x, jnp.zeros_like(x) + scale, interpret=True))(x, scale)
    np.testing.assert_array_equal(np.asarray(found), x / scale)
