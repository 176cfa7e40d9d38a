"""Whose turn it is, and the end of a session: threads, streams, capture, close."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

from bridge import Session  # noqa: E402
from tests.bridge.test_session import grown, total  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
ON_THE_CPU = pytest.mark.usefixtures("on_the_cpu")
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")


def in_thread(work):
    """Run in another thread; return what was raised there."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


# Turns


@ON_THE_CPU
def test_another_thread_needs_a_turn(session):
    step = session.jax_step(total)
    step()
    for work in (step, lambda: session.arrays, session.torch_step(lambda buffers: None)):
        (error,) = in_thread(work)
        assert isinstance(error, RuntimeError)
        assert "belong to another thread" in str(error)
        assert "with session.turn():" in str(error)


@ON_THE_CPU
def test_a_turn_is_kept_until_the_next(session):
    step = session.jax_step(total)
    step()

    def work():
        with session.turn() as same:
            assert same is session
            step()
        step()

    assert in_thread(work) == []
    with pytest.raises(RuntimeError, match="belong to another thread"):
        step()
    with session.turn(), session.turn():
        assert step().item() == 6


@ON_THE_CPU
def test_other_threads_wait_until_the_end_of_a_turn(session):
    inside, events = threading.Event(), []

    def work():
        inside.wait()
        with session.turn():
            events.append("second")

    other = threading.Thread(target=work)
    other.start()
    with session.turn():
        inside.set()
        other.join(timeout=0.2)
        events.append("first")
    other.join()
    assert events == ["first", "second"]


@ON_THE_CPU
def test_turns_exclude_each_other(copying, x):
    """Two threads read, compute and write; without turns some additions would be lost."""
    step = copying.jax_step(grown, updates="x")
    x.zero_()
    step()
    together = threading.Barrier(2)

    def work():
        together.wait()
        for _ in range(20):
            with copying.turn():
                x.copy_(x + 1)
                step()

    other = threading.Thread(target=work)
    other.start()
    work()
    other.join()
    assert x.tolist() == [81.0] * 4


@ON_THE_CPU
def test_the_first_user_needs_no_turn(session):
    assert in_thread(session.jax_step(total)) == []


# The end


@ON_THE_CPU
def test_after_close_nothing_runs(session, x):
    step, of_torch = session.jax_step(total), session.torch_step(lambda buffers: None)
    step()
    session.close()
    session.close()

    def turn():
        with session.turn():
            pass

    for work in (step, of_torch, turn, lambda: session.arrays):
        with pytest.raises(RuntimeError, match="the session must be open, got one that was closed"):
            work()
    assert session.tensors["x"] is x


@ON_THE_CPU
def test_leaving_the_block_closes_even_after_an_error(x):
    with pytest.raises(KeyError), Session({"x": x}) as session:
        raise KeyError
    with pytest.raises(RuntimeError, match="the session must be open"):
        session.jax_step(total)()


@ON_THE_CPU
def test_a_session_that_is_dropped_closes(x, monkeypatch):
    closed, close = [], Session.close
    monkeypatch.setattr(Session, "close", lambda session: (closed.append(repr(session)), close(session)))
    Session({"x": x})
    gc.collect()
    assert closed == ["Session(x; cpu)"]


@ON_THE_CPU
def test_a_session_keeps_its_memory_and_results_outlive_it():
    session = Session({"x": torch.full((4,), 5.0)})
    result = session.jax_step(lambda buffers: buffers["x"] * 2)()
    session.close()
    del session
    assert result.tolist() == [10.0] * 4


# Capture


@pytest.fixture
def capturing(session, monkeypatch):
    """Make the session's device one whose current stream is under capture."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "device", torch.device("cuda", 0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield session


def take_a_turn(session):
    with session.turn():
        pass


@ON_THE_CPU
@pytest.mark.parametrize(
    "work",
    [
        lambda session: session.jax_step(total)(),
        lambda session: session.torch_step(lambda buffers: None)(),
        lambda session: session.arrays,
        take_a_turn,
    ],
)
def test_a_stream_under_capture_is_refused_with_the_recipe(capturing, work):
    with pytest.raises(RuntimeError, match="capture what torch does before and after the step as graphs of their own"):
        work(capturing)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_capture_goes_on_after_a_refused_step():
    x = torch.zeros(64, device="cuda")
    with Session({"x": x}) as session:
        step = session.jax_step(total)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            for work in (step, lambda: session.arrays, lambda: take_a_turn(session), lambda: Session({"y": x})):
                with pytest.raises(RuntimeError, match="graphs of their own"):
                    work()
        # The recipe: replay, step, replay.
        for number in range(1, 4):
            graph.replay()
            assert step().item() == 64 * number


@pytest.mark.gpu
@NEEDS_GPU
def test_another_stream_needs_a_turn():
    with Session({"x": torch.ones(64, device="cuda")}) as session:
        step = session.jax_step(total)
        step()
        with torch.cuda.stream(torch.cuda.Stream()):
            with pytest.raises(RuntimeError, match="belong to another stream"):
                step()
            with session.turn():
                assert step().item() == 64
