"""On a machine with a GPU, too, what is not about it runs with the CPU as JAX's default device."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _cpu(request):
    if request.node.get_closest_marker("gpu") or "pallas_triton" in request.node.name:
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
