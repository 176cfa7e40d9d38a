"""Tests of this folder run on the CPU, also on a machine whose default device is a GPU, unless they are marked."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _cpu(request):
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture
def cuda_lowering(_cpu):
    """Where there is a GPU, make it the default device: that is where JAX looks for what a kernel is lowered for."""
    if jax.default_backend() != "gpu":
        yield
        return
    with jax.default_device(jax.local_devices(backend="cuda")[0]):
        yield
