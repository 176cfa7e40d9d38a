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
