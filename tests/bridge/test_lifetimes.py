"""Memory between two allocators on a GPU: every reference dropped right after dispatch, new memory asked for at once.

What a session retains is not reused, so that nothing goes wrong; without it the block comes back and is overwritten.
"""

import gc

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402

from bridge import Session, to_jax  # noqa: E402
from bridge._retained import Retained  # noqa: E402
from tests.bridge.test_races import ON_GPU, SLEEP, slow  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")]

STEPS = 1000
VALUES = 1 << 20


def session_of_nothing():
    """Return a session whose buffer only makes it one."""
    return Session({"x": torch.zeros(64, device="cuda")})


def read_late(values, after):
    """Return twice the sum of half the values, read after slow work."""
    start = (slow(after)[0] - 1).astype(jnp.int32)
    return 2 * jax.lax.dynamic_slice(values, (start,), (VALUES // 2,)).sum()


def test_arguments_of_a_jax_step():
    with session_of_nothing() as session:
        step = session.jax_step(lambda buffers, values: read_late(values, buffers["x"][0]))
        seen = []
        for number in range(STEPS):
            values = torch.full((VALUES,), float(number % 97), device="cuda")
            seen.append(step(values))
            del values
            junk = [torch.full((VALUES,), -1.0, device="cuda") for _ in range(3)]
            del junk
        torch.cuda.synchronize()
        assert sum(float(total) != number % 97 * VALUES for number, total in enumerate(seen)) == 0


def test_arguments_allocated_on_another_stream():
    """The allocator reuses a block on the stream it came from, which no fence has reached."""
    allocating = torch.cuda.Stream()
    with session_of_nothing() as session:
        step = session.jax_step(lambda buffers, values: read_late(values, buffers["x"][0]))
        seen = []
        for number in range(STEPS):
            with torch.cuda.stream(allocating):
                values = torch.full((VALUES,), float(number % 97), device="cuda")
            torch.cuda.current_stream().wait_stream(allocating)
            seen.append(step(values))
            del values
            with torch.cuda.stream(allocating):
                junk = [torch.full((VALUES,), -1.0, device="cuda") for _ in range(3)]
            del junk
        torch.cuda.synchronize()
        assert sum(float(total) != number % 97 * VALUES for number, total in enumerate(seen)) == 0


def results_read_late(fill, overwrite):
    """Return (wrong, reused): torch reads a result late, drops it, and JAX allocates and writes at once."""
    sums = torch.zeros(STEPS, device="cuda")
    reused = 0
    for number in range(STEPS):
        result = fill(jnp.float32(number % 97))
        address = result.data_ptr()
        torch.cuda._sleep(SLEEP)
        sums[number] = result.sum()
        del result
        junk = [overwrite(jnp.float32(-1.0)) for _ in range(3)]
        reused += address in [each.unsafe_buffer_pointer() for each in junk]
        del junk
    torch.cuda.synchronize()
    expected = torch.arange(STEPS, device="cuda").remainder(97) * float(VALUES)
    return int((sums != expected).sum()), reused


def test_results_of_a_jax_step():
    overwrite = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    with session_of_nothing() as session:
        step = session.jax_step(lambda buffers, value: jnp.zeros(VALUES) + value + buffers["x"][0])
        wrong, _ = results_read_late(step, overwrite)
    assert wrong == 0


def test_results_that_are_not_retained_are_overwritten(monkeypatch):
    monkeypatch.setattr(Retained, "result", lambda *arguments: None)
    overwrite = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    with session_of_nothing() as session:
        step = session.jax_step(lambda buffers, value: jnp.zeros(VALUES) + value + buffers["x"][0])
        wrong, reused = results_read_late(step, overwrite)
    assert wrong > 0
    assert reused > 0


def test_results_read_in_another_threads_turn():
    """The first stream reads late, after the second one's turn began; the second one's step lets the memory go."""
    overwrite = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    sums = torch.zeros(STEPS, device="cuda")
    with session_of_nothing() as session:
        step = session.jax_step(lambda buffers, value: jnp.zeros(VALUES) + value + buffers["x"][0])
        for number in range(STEPS):
            with session.turn():
                result = step(jnp.float32(number % 97))
            with torch.cuda.stream(second), session.turn():
                with torch.cuda.stream(first):
                    torch.cuda._sleep(SLEEP)
                    sums[number] = result.sum()
                    del result
                step(jnp.float32(-1.0))
            junk = [overwrite(jnp.float32(-1.0)) for _ in range(4)]
            del junk
        torch.cuda.synchronize()
        expected = torch.arange(STEPS, device="cuda").remainder(97) * float(VALUES)
        assert int((sums != expected).sum()) == 0


def test_results_that_outlive_their_session():
    overwrite = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    sums = torch.zeros(20, device="cuda")
    for number in range(20):
        with session_of_nothing() as session:
            result = session.jax_step(lambda buffers, value: jnp.zeros(VALUES) + value)(jnp.float32(number))
        torch.cuda._sleep(20 * SLEEP)
        sums[number] = result.sum()
        del result
        junk = [overwrite(jnp.float32(-1.0)) for _ in range(4)]
        del junk
    assert sums.tolist() == [number * VALUES for number in range(20)]


def test_results_without_a_session_are_overwritten():
    """What the session is there for: JAX gives a dropped export's memory away while torch has yet to read it."""
    make = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    wrong, reused = results_read_late(lambda value: torch.from_dlpack(make(value)), make)
    assert wrong > 0
    assert reused > 0


def test_arguments_of_a_torch_step():
    make = jax.jit(lambda value: jnp.zeros(VALUES) + value)
    seen = []
    with session_of_nothing() as session:

        def read(buffers, values):
            torch.cuda._sleep(SLEEP)
            return values.sum()

        step = session.torch_step(read)
        for number in range(STEPS):
            values = make(jnp.float32(number % 97))
            seen.append(step(values))
            del values
            junk = [make(jnp.float32(-1.0)) for _ in range(3)]
            del junk
        assert sum(float(total) != number % 97 * VALUES for number, total in enumerate(seen)) == 0


def test_results_of_a_torch_step():
    late = jax.jit(read_late)
    seen = []
    with session_of_nothing() as session:
        step = session.torch_step(lambda buffers, number: torch.full((VALUES,), float(number), device="cuda"))
        for number in range(STEPS):
            values = step(number % 97)
            seen.append(late(values, jnp.float32(1)))
            del values
            junk = [torch.full((VALUES,), -1.0, device="cuda") for _ in range(3)]
            del junk
        torch.cuda.synchronize()
        assert sum(float(total) != number % 97 * VALUES for number, total in enumerate(seen)) == 0


def test_a_session_dropped_right_after_its_step():
    seen = []
    for number in range(20):  # each compiles its step anew
        session = Session({"x": torch.full((VALUES,), float(number), device="cuda")})
        seen.append(session.jax_step(lambda buffers: read_late(buffers["x"], buffers["x"][0]))())
        session.close()
        del session
        gc.collect()
        junk = [torch.full((VALUES,), -1.0, device="cuda") for _ in range(3)]
        del junk
    torch.cuda.synchronize()
    assert sum(float(total) != number * VALUES for number, total in enumerate(seen)) == 0


def test_an_import_keeps_its_tensor():
    late = jax.jit(read_late)
    seen = []
    for number in range(STEPS):
        values = torch.full((VALUES,), float(number % 97), device="cuda")
        seen.append(late(to_jax(values), jnp.float32(1)))
        del values
        torch.cuda.current_stream().synchronize()
        junk = [torch.full((VALUES,), -1.0, device="cuda") for _ in range(3)]
        del junk
    torch.cuda.synchronize()
    assert sum(float(total) != number % 97 * VALUES for number, total in enumerate(seen)) == 0
