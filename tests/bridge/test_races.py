"""Order between the frameworks on a GPU: slow producers and slow consumers on either side, with and without fences.

A value that crosses is the step's number, so that anything early or late is told by its value. Without the fence the
same tests must fail: else they would prove nothing.
"""

import threading

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402

from bridge import Session, _fence, _steps  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")]

STEPS = 1000
VALUES = 1 << 20
SLEEP = 1_000_000
"""Clock cycles of a slow torch kernel: half a millisecond, several times the host time of a step."""


def slow(after, slowness=1):
    """Return a one of JAX, about half a millisecond late, or as many times that."""

    def work(_, matrix):
        return (matrix @ matrix) * (1.0 / 2048)

    matrix = jnp.ones((2048, 2048), jnp.bfloat16) + after.astype(jnp.bfloat16) * 0
    return jax.lax.fori_loop(0, 14 * slowness, work, matrix)[0, :1].astype(jnp.float32)


def torch_writes_slowly(x, step_of, steps, slowness):
    """Read after write: torch sleeps and writes, JAX reads at once."""
    read = step_of(lambda buffers: buffers["x"].sum())
    for number in range(steps):
        torch.cuda._sleep(SLEEP * slowness)
        x.fill_(number % 97)
        yield number % 97, read()


def jax_reads_slowly(x, step_of, steps, slowness):
    """Write after read: JAX computes first and reads then, torch overwrites at once."""

    def late(buffers):
        # Where to read depends on the slow work, so that no compiler reads early.
        start = slow(buffers["x"][0], slowness)[0] - 1
        return 2 * jax.lax.dynamic_slice(buffers["x"], (start.astype(jnp.int32),), (VALUES // 2,)).sum()

    read = step_of(late)
    for number in range(steps):
        x.fill_(number % 97)
        total = read()
        x.fill_(-1.0)
        yield number % 97, total


def jax_writes_slowly(x, step_of, steps, slowness):
    """Read after write: JAX computes first and updates in place then, torch reads at once."""

    def late(buffers, number):
        one = slow(number, slowness)
        return one, {"x": jnp.zeros_like(buffers["x"]) + number * one}

    write = step_of(late, updates=("x",))
    for number in range(steps):
        write(jnp.float32(number % 97))
        yield number % 97, x.sum()


def torch_reads_slowly(x, step_of, steps, slowness):
    """Write after read: torch sleeps and reads, JAX updates in place at once."""

    def overwrite(buffers, number):
        return number * 2, {"x": jnp.zeros_like(buffers["x"]) + number}

    write = step_of(overwrite, updates=("x",))
    write(jnp.float32(0))
    for number in range(steps):
        torch.cuda._sleep(SLEEP * slowness)
        total = x.sum()
        write(jnp.float32((number + 1) % 97))
        yield number % 97, total


SLOWER = {"steps": 100, "slowness": 20}
"""Without a fence a race is lost only while the other side is slower than the host, however slow that is."""

RACES = [torch_writes_slowly, jax_reads_slowly, jax_writes_slowly, torch_reads_slowly]


def wrong_steps(race, owner="torch", stream="default", steps=STEPS, slowness=1):
    """Return how many of the steps saw a value of another step."""
    x = torch.zeros(VALUES, device="cuda") if owner == "torch" else jnp.zeros(VALUES)
    chosen = torch.cuda.Stream() if stream == "side" else torch.cuda.current_stream()
    jax.block_until_ready(x) if owner == "jax" else None
    torch.cuda.synchronize()
    with torch.cuda.stream(chosen), Session({"x": x}) as session:
        seen = list(race(session.tensors["x"], session.jax_step, steps, slowness))
        torch.cuda.synchronize()
        return sum(float(total) != expected * VALUES for expected, total in seen)


@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("owner", ["torch", "jax"])
@pytest.mark.parametrize("race", RACES)
def test_no_step_of_a_thousand_sees_another(race, owner, stream):
    assert wrong_steps(race, owner, stream) == 0


@pytest.mark.parametrize("race", [torch_writes_slowly, torch_reads_slowly])
def test_without_the_ticket_jax_does_not_wait(race, monkeypatch):
    """A ticket imported once says nothing about later work."""
    punch = _fence.Ticket.punch
    once = {}

    def punch_once(ticket, stream):
        if ticket not in once:
            once[ticket] = punch(ticket, stream)
        return once[ticket]

    monkeypatch.setattr(_fence.Ticket, "punch", punch_once)
    assert wrong_steps(race, **SLOWER) > SLOWER["steps"] // 2


@pytest.mark.parametrize("race", [jax_reads_slowly, jax_writes_slowly])
def test_without_the_export_torch_does_not_wait(race, monkeypatch):
    """A result exported to another stream leaves torch's current one where it was."""
    other = torch.cuda.Stream()
    monkeypatch.setattr(
        _steps, "await_result", lambda array, stream: torch.from_dlpack(array.__dlpack__(stream=other.cuda_stream))
    )
    assert wrong_steps(race, **SLOWER) > SLOWER["steps"] // 2


def test_threads_take_turns():
    """Two threads, two streams, one session: each sees its own writes, a thousand times."""
    wrong = []

    def worker(session, step, first):
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = []
            for number in range(first, first + STEPS // 2):
                with session.turn():
                    torch.cuda._sleep(SLEEP // 4)
                    session.tensors["x"].fill_(number)
                    seen.append((number, step()))
            torch.cuda.current_stream().synchronize()
            wrong.append(sum(float(total) != number * VALUES for number, total in seen))

    with Session({"x": torch.zeros(VALUES, device="cuda")}) as session:
        step = session.jax_step(lambda buffers: buffers["x"].sum())
        threads = [threading.Thread(target=worker, args=(session, step, first)) for first in (0, 10_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [0, 0]
