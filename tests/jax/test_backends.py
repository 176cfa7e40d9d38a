"""Which backend serves a call: what a JAX without Pallas-Triton does, and what a command buffer holds."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import swa_pallas
from swa_pallas import _device, _planning, _run
from swa_plan import DeviceProfile, plan
from tests.jax.helpers import TRITON_CALL, cuda_target, make_step, same_bits, specs

WINDOW = 16


@pytest.fixture
def without_pallas_triton(monkeypatch):
    """Run as if this JAX had dropped the Triton lowering of Pallas."""
    for module in (_device, _planning, _run):
        monkeypatch.setattr(module, "has_pallas_triton", lambda: False)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_without_the_triton_lowering_xla_serves_every_platform(without_pallas_triton):
    step = make_step()
    expected = swa_pallas.swa_decode(*step, window=WINDOW, backend="xla")
    assert same_bits(swa_pallas.swa_decode(*step, window=WINDOW), expected)
    with cuda_target():
        lowered = jax.jit(lambda *each: swa_pallas.swa_decode(*each, window=WINDOW)).trace(*specs(tuple(step)))
        assert TRITON_CALL not in lowered.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("backend", ["pallas_triton", "interpret"])
def test_without_the_triton_lowering_its_backends_are_refused(without_pallas_triton, backend):
    with pytest.raises(RuntimeError, match=rf"backend '{backend}' needs jax.experimental.pallas.triton"):
        swa_pallas.swa_decode(*make_step(), window=WINDOW, backend=backend)


def test_without_the_triton_lowering_its_plans_are_refused(without_pallas_triton):
    step = make_step()
    plan = swa_pallas.plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    with pytest.raises(RuntimeError, match=r"needs jax.experimental.pallas.triton"):
        swa_pallas.swa_decode(*step, window=WINDOW, plan=plan)


def test_a_kernel_backend_on_another_platform_is_refused():
    step = make_step()
    plan = swa_pallas.plan_for(*step[:3], window=WINDOW, device=DeviceProfile.named("h200"))
    with pytest.raises(ValueError, match=r"backend 'pallas_triton' of swa_decode lowers for cuda, got platform cpu"):
        swa_pallas.swa_decode(*step, window=WINDOW, plan=plan)


def test_lowering_for_an_unknown_gpu_says_how_to_plan(monkeypatch):
    monkeypatch.setattr(_planning, "lowering_profile", lambda: None)
    jax.clear_caches()
    traced = jax.jit(lambda *each: swa_pallas.swa_decode(*each, window=WINDOW)).trace(*make_step())
    with pytest.raises(ValueError, match=r"must know its GPU.*plan=plan_for"):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
def test_several_layers_are_one_command_buffer(tmp_path):
    code = """
        import jax, jax.numpy as jnp
        import swa_pallas

        cache = swa_pallas.PagedCache.empty(
            "layers pages block kv_heads dim", layers=4, pages=64, block=16, kv_heads=2, k_dim=64
        )
        table = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
        lens = jnp.array([500, 300], jnp.int32)

        @jax.jit
        def layers(query, cache, table, lens):
            for layer in range(4):
                query = swa_pallas.swa_decode(query, cache, table, lens, window=512, layer=layer)
            return query

        layers(jnp.ones((2, 8, 64), jnp.bfloat16), cache, table, lens).block_until_ready()
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)
    (sequence,) = tmp_path.glob("*jit_layers*thunk_sequence_after_thunk_passes.txt")
    lines = sequence.read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if "kCommandBuffer" in line)
    inside = [line for line in lines[start + 1 :] if line.startswith(" ")]
    assert sum("swa_decode_split" in line for line in inside) == 4
    assert sum("swa_decode_combine" in line for line in inside) == 4


def test_plans_are_for_launches_that_wait():
    """XLA has no dependent launch, so that a combine costs more and fewer steps are split."""
    h200 = DeviceProfile.named("h200")
    differing = []
    for requests in range(1, 33):
        shapes = [((requests, 64, 192), jnp.bfloat16), ((64, 64, 8, 192), jnp.bfloat16), ((requests, 32), jnp.int32)]
        query, pages, table = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        chosen = swa_pallas.plan_for(query, (pages, pages), table, window=512, device=h200)
        assert chosen == plan(chosen.problem, h200, dependent_launch=False)
        other = plan(chosen.problem, h200)
        if chosen != other:
            differing.append((chosen.splits, other.splits))
    assert differing
    assert all(waiting <= launched_early for waiting, launched_early in differing)
