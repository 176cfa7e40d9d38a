"""`Session` on a GPU: updates in place without a copy, errors."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

from bridge import Session  # noqa: E402
from tests.bridge.test_session import assert_shared, grown  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")


@pytest.mark.gpu
@NEEDS_GPU
def test_buffers_on_a_gpu_and_the_cpu_are_refused():
    with pytest.raises(ValueError, match=r"buffers must be on one device.*got cpu, cuda:0"):
        Session({"a": torch.zeros(4, device="cuda:0"), "b": torch.zeros(16)})


@pytest.mark.gpu
@NEEDS_GPU
def test_updates_on_a_gpu_need_no_copy():
    x = torch.zeros(64, device="cuda")
    with Session({"x": x, "y": torch.ones(64, device="cuda")}) as session:
        pointer = x.data_ptr()
        session.jax_step(grown, updates="x")()
        assert session.pointers["x"] == [(pointer, pointer)]
        swap = session.jax_step(lambda buffers: (None, {"x": buffers["y"], "y": buffers["x"]}), updates=("x", "y"))
        session.tensors["y"].fill_(5)
        swap()
        assert x.tolist() == [5.0] * 64
        assert session.tensors["y"].tolist() == [1.0] * 64
        assert_shared(session)


@pytest.mark.gpu
@NEEDS_GPU
def test_an_exception_leaves_a_gpus_session_usable():
    x = torch.zeros(64, device="cuda")
    with Session({"x": x}) as session:

        def fails(buffers):
            raise KeyError("in the function")

        with pytest.raises(KeyError):
            session.jax_step(fails, updates="x")()
        with pytest.raises(ValueError, match="must keep its shape and dtype"):
            session.jax_step(lambda buffers: (None, {"x": buffers["x"][:2]}), updates="x")()
        session.jax_step(grown, updates="x")()
        assert x.tolist() == [1.0] * 64
        assert_shared(session)
