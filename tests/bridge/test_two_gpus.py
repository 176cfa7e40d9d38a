"""Several GPUs: a session belongs to one device, and arrays sharded over several cross shard by shard."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import Session, to_jax, to_torch  # noqa: E402

TWO = torch.cuda.is_available() and torch.cuda.device_count() > 1 and jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(not TWO, reason="needs two CUDA devices")]

STEPS = 200
VALUES = 1 << 20
LAYOUT = "kv pages block kv_heads dim"


def test_a_device_that_is_not_current():
    tensor = torch.arange(64, dtype=torch.float32, device="cuda:1")
    torch.cuda.set_device(0)
    array = to_jax(tensor)
    assert torch.cuda.current_device() == 0
    assert array.devices() == {jax.local_devices()[1]}
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array + 1)
    assert back.device == tensor.device
    assert torch.equal(back, tensor + 1)


def test_steps_on_the_second_device_are_ordered():
    """The first device is current all along; torch is slow to write, and JAX's result is read at once."""
    x = torch.zeros(VALUES, device="cuda:1")
    torch.cuda.set_device(0)
    with Session({"x": x}) as session:
        step = session.jax_step(lambda buffers: buffers["x"].sum())
        seen = []
        for number in range(STEPS):
            with torch.cuda.device(1):
                torch.cuda._sleep(500_000)
            x.fill_(number % 97)
            seen.append(step() * 1)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        assert [float(total) for total in seen] == [number % 97 * VALUES for number in range(STEPS)]


def test_buffers_of_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"one session a device.*cuda:0, cuda:1"):
        Session({"x": torch.zeros(64, device="cuda:0"), "y": torch.zeros(64, device="cuda:1")})


def test_a_sharded_cache_crosses_shard_by_shard():
    """A cache sharded over kv heads: torch decodes each shard on its own device, as JAX does under shard_map."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(3)
    base = rng.standard_normal((2, 8, 16, 4, 64)).astype(jnp.bfloat16)
    specs = swa_pallas.cache_specs(LAYOUT, kv_heads="heads")
    sharded = jax.device_put(swa_pallas.PagedCache(jnp.asarray(base), LAYOUT), NamedSharding(mesh, specs.bases[0]))
    with pytest.raises(ValueError, match="addressable_shards"):
        to_torch(sharded)
    query = rng.standard_normal((2, 8, 64)).astype(jnp.bfloat16)
    table = np.array([[5, 2], [7, 1]], np.int32)
    lens = np.array([20, 32], np.int32)
    outs = []
    for shard in sharded.bases[0].addressable_shards:
        cache = swa_torch.PagedCache(to_torch(shard.data), LAYOUT)
        heads = slice(shard.index[3].start * 2, shard.index[3].stop * 2)
        mine = [torch.from_numpy(each).to(cache.device) for each in (table, lens)]
        rows = to_torch(jax.device_put(query[:, heads], shard.device))
        with Session({"cache": cache, "query": rows, "table": mine[0], "lens": mine[1]}) as session:
            step = session.jax_step(
                lambda buffers: swa_pallas.swa_decode(
                    buffers["query"], buffers["cache"], buffers["table"], buffers["lens"], window=24
                )
            )
            outs.append((step().float().cpu(), swa_torch.swa_decode(rows, cache, *mine, window=24).float().cpu()))
    theirs = jax.jit(
        jax.shard_map(
            lambda query, cache, table, lens: swa_pallas.swa_decode(query, cache, table, lens, window=24),
            mesh=mesh,
            in_specs=(PartitionSpec(None, "heads"), specs, PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(None, "heads"),
        )
    )(query, sharded, table, lens)
    expected = np.asarray(theirs.astype(jnp.float32))
    assert np.array_equal(torch.cat([jax_out for jax_out, _ in outs], 1).numpy(), expected)
    torch_out = torch.cat([torch_out for _, torch_out in outs], 1).numpy()
    assert np.abs(torch_out - expected).max() <= 2 * 2.0 ** (np.floor(np.log2(np.abs(expected).max())) - 7)


STARTS_LATE = """
import torch
torch.cuda.set_device(0)
tensor = torch.zeros(64, device="cuda")
import bridge
bridge.to_jax(tensor)
print(torch.cuda.current_device(), torch.zeros(1, device="cuda").device)
"""


def test_a_jax_that_starts_in_the_bridge_leaves_torchs_device_alone():
    """On its own JAX leaves the thread on its last GPU, where torch would then allocate."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(
        [sys.executable, "-c", STARTS_LATE], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stdout.split() == ["0", "cuda:0"]
