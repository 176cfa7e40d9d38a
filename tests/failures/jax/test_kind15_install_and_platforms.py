"""Kind 15 of the known failures: JAX without PyTorch, and a backend on a platform that it does not serve."""

from __future__ import annotations

import jax
import pytest

import swa_pallas
from swa_plan import tolerance
from tests.contract.jax_runner import BACKENDS, arguments, to_numpy
from tests.failures.probes import step
from tests.failures.processes import run_without

JAX_ALONE = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp, numpy as np, swa_pallas
query, pair = jnp.ones((1, 2, 16)), tuple(jnp.ones((2, 16, 1, 16)) for _ in range(2))
table, lens = jnp.zeros((1, 1), jnp.int32), jnp.full((1,), 5, jnp.int32)
pair = swa_pallas.append(pair, 3 * query[:, :1], 3 * query[:, :1], jnp.array([4], jnp.int32))
for backend in (None, "xla", "interpret"):
    assert (swa_pallas.swa_decode(query, pair, table, lens, window=1, backend=backend) == 3).all()
assert swa_pallas.plan_for(query, pair, table, window=8).kernel == "ops"
assert (swa_pallas.merge_states(jnp.ones((2, 1, 2, 16)), jnp.zeros((2, 1, 2)))[0] == 1).all()
"""


def test_jax_works_without_torch_and_triton(tmp_path):
    """C115, vllm-project/vllm#14888: every call works on a machine that has JAX alone."""
    run_without(("torch", "triton"), JAX_ALONE, tmp_path)


def test_cpu_arrays_give_the_right_result():
    """C119, AnswerDotAI/ModernBERT#152: CPU arrays are served, with or without a GPU in the machine."""
    inputs = step((100,), kv_heads=1)
    positional, _ = arguments(inputs, "jax-xla")
    tolerance.assert_close(to_numpy(swa_pallas.swa_decode(*positional, window=512)), inputs)


def test_cpu_arrays_never_reach_the_gpu_backend():
    """C119, AnswerDotAI/ModernBERT#152: asking for it is an error that names the platform."""
    positional, _ = arguments(step((100,), kv_heads=1), "jax-xla")
    with pytest.raises(ValueError, match=r"pallas_triton.*(CUDA|platform cpu)"):
        swa_pallas.swa_decode(*positional, window=512, backend="pallas_triton")


def test_gpu_plan_on_the_cpu_is_refused():
    """C119, AnswerDotAI/ModernBERT#152: a plan made for a GPU does not silently run elsewhere."""
    from swa_plan import DeviceProfile

    (query, cache, table, lens), _ = arguments(step((100,), kv_heads=1), "jax-xla")
    plan = swa_pallas.plan_for(query, cache, table, window=512, device=DeviceProfile.named("h200"))
    with pytest.raises(ValueError, match=r"pallas_triton.*cuda.*got platform cpu"):
        swa_pallas.swa_decode(query, cache, table, lens, window=512, plan=plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_kinds_are_refused_by_name(backend):
    """C119, AnswerDotAI/ModernBERT#152: a list or a number is not an array."""
    (query, cache, table, lens), _ = arguments(step((100,), kv_heads=1), backend)
    arrays = {"query": query, "block_table": table, "seq_lens": lens}
    for name in arrays:
        wrong = {**arrays, name: jax.tree.map(float, [1.0])}
        with pytest.raises(TypeError, match=f"{name} must be a JAX array, got list"):
            swa_pallas.swa_decode(wrong["query"], cache, wrong["block_table"], wrong["seq_lens"], window=512)
