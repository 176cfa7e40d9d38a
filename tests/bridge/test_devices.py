"""Versions, clients, devices and streams with which nothing can be exchanged, and what only a GPU refuses."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from bridge import _exchange, to_jax, to_torch  # noqa: E402
from bridge._devices import check_client, check_not_capturing, check_torch_device, jax_device_of  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")]
CUDA = torch.device("cuda", 0)


def test_versions_come_first(monkeypatch):
    def refuse():
        raise NotImplementedError("torch must be at least")

    monkeypatch.setattr(_exchange, "check_versions", refuse)
    for exchange in (to_jax, to_torch):
        with pytest.raises(NotImplementedError, match="torch must be at least"):
            exchange(None)


def test_hip(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NotImplementedError, match=r"x must be on an NVIDIA GPU, got HIP 7\.0"):
        check_torch_device("x", CUDA)
    check_torch_device("x", torch.device("cpu"))


def client(message):
    def get_stream():
        raise jax.errors.JaxRuntimeError(message)

    return SimpleNamespace(get_stream_for_external_ready_events=get_stream)


def test_a_client_that_cannot_order():
    with pytest.raises(NotImplementedError, match=r"got one that cannot .*leave use_tfrt_gpu_client out of"):
        check_client(client("UNIMPLEMENTED: GetStreamForExternalReadyEvents is not supported."))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        check_client(client("INTERNAL: broken"))
    with pytest.raises(NotImplementedError, match="UNIMPLEMENTED"):  # JAX still words it so
        check_client(jax.local_devices(backend="cpu")[0])


@pytest.fixture
def current(monkeypatch):
    """Let torch have GPUs; return its current device in a list."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    return current


def gpus(*indices):
    return [
        SimpleNamespace(local_hardware_id=index, get_stream_for_external_ready_events=lambda: 7) for index in indices
    ]


def test_a_jax_without_the_gpu(monkeypatch, current):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(ValueError, match=r"x must be on a device that JAX sees too, got 'cuda:0' .*Unknown backend"):
        jax_device_of("x", CUDA)


def test_a_jax_that_sees_other_gpus(monkeypatch, current):
    seen = gpus(0, 2)
    monkeypatch.setattr(jax, "local_devices", lambda backend: seen)
    assert jax_device_of("x", torch.device("cuda", 2)) is seen[1]
    with pytest.raises(ValueError, match=r"JAX sees too \(cuda:0, cuda:2\), got 'cuda:1'"):
        jax_device_of("x", torch.device("cuda", 1))


def test_a_jax_that_starts_leaves_torchs_current_device(monkeypatch, current):
    def start(backend):
        current[0] = 3
        return gpus(0, 1, 2, 3)

    monkeypatch.setattr(jax, "local_devices", start)
    current[0] = 1
    assert jax_device_of("x", CUDA).local_hardware_id == 0
    assert current == [1]


def test_a_stream_under_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"capture what torch does before and after the step as graphs of their own"):
        check_not_capturing(CUDA)
    assert to_jax(torch.ones(4)).sum() == 4  # the CPU has no part in it


class TestOnAGpu:
    pytestmark = GPU

    @pytest.mark.parametrize("offset", [2, 4, 8])
    def test_misaligned(self, offset):
        base = torch.arange(1024, device="cuda").to(torch.bfloat16)
        x = base[offset // 2 :]
        words = rf"x must start at a multiple of 16 bytes on the cuda, got one at byte {offset} of its storage"
        with pytest.raises(ValueError, match=words):
            to_jax(x)
        assert jnp.array_equal(to_jax(x.clone()), to_jax(x, copy=True))

    def test_aligned_to_16_bytes(self):
        base = torch.arange(1024, device="cuda").to(torch.bfloat16)
        array = to_jax(base[8:])
        assert array.unsafe_buffer_pointer() == base.data_ptr() + 16
        assert float((array + 1)[0]) == 9

    @pytest.mark.parametrize("view", [lambda x: x[::2], lambda x: x.view(8, 8).t(), lambda x: x[:1].expand(5)])
    def test_strided(self, view):
        x = view(torch.arange(64.0, device="cuda"))
        with pytest.raises(ValueError, match="x must be contiguous"):
            to_jax(x)
        assert np.array_equal(np.asarray(to_jax(x, copy=True)), x.cpu().numpy())

    def test_pinned_memory(self):
        x = torch.arange(4.0).pin_memory()
        with pytest.raises(ValueError, match="x must be in ordinary CPU memory or on a GPU, got pinned host memory"):
            to_jax(x)
        assert to_jax(x.clone()).tolist() == to_jax(x, copy=True).tolist() == x.tolist()

    def test_memory_of_the_host(self):
        x = jnp.arange(4.0)
        x = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        with pytest.raises(ValueError, match=r"x must be in device memory, got 'pinned_host': jax\.device_put\(x, "):
            to_torch(x)
        assert to_torch(jax.device_put(x, x.sharding.with_memory_kind("device"))).tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_hip(self, monkeypatch):
        x = torch.ones(4, device="cuda")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        with pytest.raises(NotImplementedError, match="x must be on an NVIDIA GPU"):
            to_jax(x)

    def test_under_capture(self):
        x, y = torch.zeros(64, device="cuda"), jnp.ones(64)
        jax.block_until_ready(y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            for exchange, given in ((to_jax, x), (to_torch, y)):
                with pytest.raises(RuntimeError, match="graphs of their own"):
                    exchange(given)
        graph.replay()
        assert float(to_jax(x).sum()) == 64
