"""Where the bridge's tests run."""

import pytest


@pytest.fixture
def on_the_cpu():
    """On a machine with a GPU, too, what is not about it runs with the CPU as JAX's default device."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture
def x():
    """Return 0, 1, 2, 3 as a tensor."""
    import torch

    return torch.arange(4.0)


@pytest.fixture
def session(x):
    """Return a session of ``x`` and of ones, ``y``."""
    import torch

    from bridge import Session

    with Session({"x": x, "y": torch.ones(4)}) as session:
        yield session


@pytest.fixture
def copying(x):
    """Return the same, on which a JAX step may update."""
    import torch

    from bridge import Session

    with Session({"x": x, "y": torch.ones(4)}, copy=True) as session:
        yield session
