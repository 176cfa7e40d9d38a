"""Steps that known failures of both frameworks share."""

import pytest

from swa_plan import reference
from tests.failures.probes import KV_HEADS, step


@pytest.fixture(scope="module")
def fp32_step():
    """Return a step of 600 keys and its float64 result."""
    inputs = step((600,), dtype="float32", kv_heads=min(KV_HEADS, 2))
    return inputs, reference.swa_decode(*inputs.arrays(), window=512)
