"""torch keeps a storage's Python object as long as the storage: how a session knows that no tensor views a result.

Nothing here goes through the bridge. A torch that made the object anew for each call would have the session give JAX's
memory away while tensors view it.
"""

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def tensor(request):
    """Return a tensor on JAX's memory, in a list that is its only holder."""
    with jax.default_device(jax.local_devices(backend=request.param)[0]):
        yield [torch.from_dlpack(jnp.arange(64.0) + 1)]


def reference(tensor):
    """Return what a session keeps of a result."""
    return weakref.ref(tensor[0].untyped_storage())


def is_dead(storage):
    gc.collect()
    return storage() is None


@pytest.mark.parametrize(
    "viewed",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1:],
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.detach(),
        lambda tensor: torch.nn.Parameter(tensor).view(8, 8),
        lambda tensor: (torch.ones(64, device=tensor.device, requires_grad=True) * tensor).sum(),
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["itself", "part", "other dtype", "detached", "parameter", "saved for backward", "capsule", "storage"],
)
def test_a_reference_lives_until_the_last_view(tensor, viewed):
    storage = reference(tensor)
    view = viewed(tensor.pop())
    assert not is_dead(storage)
    del view
    assert is_dead(storage)


def test_a_reference_outlives_garbage_that_holds_the_storage(tensor):
    """A collector that saw only Python's references would find the object unreachable, and clear the reference."""
    storage = reference(tensor)
    view = tensor[0][1:]
    cycle: list[Any] = [tensor[0], tensor.pop().untyped_storage()]
    cycle.append(cycle)
    del cycle
    assert not is_dead(storage)
    assert view[0].item() == 2.0
    del view
    assert is_dead(storage)
