"""What a session does on a GPU, watched on the CPU: streams that only log what they wait for.

The GPU's own behaviour is tested in `test_races.py` and `test_lifetimes.py`; here it is which waits are asked for, and
when memory is let go.
"""

import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402

from bridge import Session, _fence, _retained, _session, _steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Stream:
    """A stream whose work is a list; it remembers how much of another stream's work it waits for."""

    def __init__(self, name):
        self.name = name
        self.work = []
        self.waits = {}

    def wait_stream(self, other):
        self.waits[other.name] = len(other.work)


class Event:
    passed = False

    def record(self, stream=None):
        pass

    def query(self):
        return Event.passed


class Gpu:
    """`session(...)` makes one as on a GPU, `stream` is torch's current one, `log` what happened."""

    def __init__(self):
        self.stream = Stream("first")
        self.log = []
        self.made = []

    def session(self, buffers):
        session = Session(buffers)
        session.on_gpu = True
        session._user = (None, self.stream)
        self.made.append(weakref.ref(session))
        return session


@pytest.fixture
def gpu(monkeypatch):
    """Return a `Gpu`."""
    gpu = Gpu()
    monkeypatch.setattr(Session, "_current_stream", lambda session: gpu.stream)
    monkeypatch.setattr(_session, "_stream_id", lambda index: gpu.stream)
    monkeypatch.setattr(Session, "_on_device", lambda session: _session.nullcontext())
    for module in (_retained, _session):
        monkeypatch.setattr(module, "synchronise", lambda device: gpu.log.append("synchronise"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(_retained, "_outliving", {})

    def await_result(array, stream):
        weakref.finalize(array, gpu.log.append, "let go")
        return torch.from_dlpack(array)

    monkeypatch.setattr(_steps, "await_result", await_result)
    yield gpu
    for session in filter(None, (made() for made in gpu.made)):
        session._open = False  # there is no device to wait for


def doubled(buffers):
    return buffers["x"] * 2


def test_a_result_is_kept_until_a_step_that_began_after_its_last_view(gpu, x):
    session = gpu.session({"x": x})
    step = session.jax_step(doubled)
    view = step()[1:]
    gc.collect()
    step()
    assert gpu.log == []
    del view
    gc.collect()
    assert gpu.log == []
    step()
    gc.collect()
    assert gpu.log == ["let go", "let go"]  # the viewed one, and that of the step between
    assert len(session._retained) == 1


def test_a_step_without_results_is_waited_for_too(gpu, x):
    session = gpu.session({"x": x})
    assert session.jax_step(lambda buffers: None)() is None
    assert len(session._retained) == 1


def test_results_do_not_pile_up(gpu, x):
    session = gpu.session({"x": x})
    step = session.jax_step(doubled)
    for _ in range(20):
        step()
    assert len(session._retained) <= 2


def test_memory_is_let_go_after_the_stream_that_may_read_it(gpu, x, monkeypatch):
    """The first stream's read comes after the second one's turn began, which therefore knows nothing of it."""
    punch, waited = _fence.Ticket.punch, []

    def watched(ticket, stream):
        waited.append(dict(stream.waits))
        return punch(ticket, stream)

    monkeypatch.setattr(_fence.Ticket, "punch", watched)
    session = gpu.session({"x": x})
    step = session.jax_step(doubled)
    first, second = gpu.stream, Stream("second")
    with session.turn():
        result = step()
        first.work.append("step")
    gpu.stream = second
    with session.turn():
        assert second.waits == {"first": 1}
        first.work.append("read of the result")
        del result
        gc.collect()
        step()
    # Before the ticket, which is what the program waits for.
    assert waited == [{}, {"first": 2}]


def test_the_first_user_comes_after_the_stream_the_session_was_made_on(gpu, x):
    made_on = gpu.stream
    for enter in (
        lambda session: session.jax_step(doubled)(),
        lambda session: session.torch_step(lambda buffers: None)(),
        lambda session: session.turn().__enter__(),
    ):
        gpu.stream = made_on
        session = gpu.session({"x": x})
        made_on.work.append("what the buffers were filled with")
        gpu.stream = Stream("other")
        enter(session)
        assert gpu.stream.waits == {"first": len(made_on.work)}


def test_a_turn_inside_a_turn_is_given_back(gpu, x):
    session = gpu.session({"x": x})
    outer, inner = gpu.stream, Stream("inner")
    with session.turn():
        gpu.stream = inner
        with session.turn():
            inner.work.append("write")
        gpu.stream = outer
        assert outer.waits == {"inner": 1}
        session.jax_step(doubled)()


def test_arrays_that_torch_reads_are_kept_until_it_has(gpu, x):
    session = gpu.session({"x": x})
    value = jnp.ones(4)
    weakref.finalize(value, gpu.log.append, "let go")

    def failing(buffers, values):
        raise KeyError("after its kernels were queued")

    with pytest.raises(KeyError):
        session.torch_step(failing)(value)
    del value
    gc.collect()
    session.torch_step(lambda buffers: None)()
    assert gpu.log == []
    Event.passed = True
    try:
        session.torch_step(lambda buffers: None)()
        gc.collect()
        assert gpu.log == ["let go"]
    finally:
        Event.passed = False


def test_close_waits_for_the_device_even_if_no_step_ran(gpu, x):
    session = gpu.session({"x": x})
    session.close()
    assert gpu.log == ["synchronise"]
    session.close()
    assert gpu.log == ["synchronise"]


def test_a_dropped_session_waits_too(gpu, x):
    session = gpu.session({"x": x})
    del session
    gc.collect()
    assert gpu.log == ["synchronise"]


def test_a_result_outlives_its_session(gpu, x):
    """It is let go by a later session, after the device was waited for since the last view was gone."""
    session = gpu.session({"x": x})
    result = session.jax_step(doubled)()
    session.close()
    del session
    gc.collect()
    assert gpu.log == ["synchronise"]
    del result
    gc.collect()
    assert gpu.log == ["synchronise"]
    gpu.session({"x": x}).close()
    gc.collect()
    assert gpu.log == ["synchronise", "synchronise", "let go", "synchronise"]


def test_a_session_dropped_under_capture_is_kept(gpu, x, monkeypatch):
    """Waiting would break the capture."""
    session = gpu.session({"x": x})
    with monkeypatch.context() as patch:
        patch.setattr(_session, "is_capturing", lambda device: True)
        del session
        gc.collect()
    assert gpu.log == []
    assert len(_retained._outliving) == 1
    gpu.session({"x": x}).close()
    assert gpu.log[0] == "synchronise"
    assert not _retained._outliving


def test_a_session_may_be_collected_while_another_is_made(gpu, x):
    """By a collection that starts in the midst of letting things go: no lock may be waited for there."""

    class Model:
        pass

    def make():
        model = Model()
        model.session, model.itself = gpu.session({"x": x}), model

    def collect():
        gc.collect()
        return False

    make()
    _retained.outlive(collect, torch.device("cpu"), None)
    release = threading.Thread(target=_retained.release_outliving, daemon=True)
    release.start()
    release.join(20)
    assert not release.is_alive(), "deadlock"
    assert all(made() is None for made in gpu.made)


def test_steps_must_be_jitted(gpu, x):
    session = gpu.session({"x": x})
    with jax.disable_jit(), pytest.raises(RuntimeError, match="jax_disable_jit"):
        session.jax_step(doubled)()


def test_steps_must_be_jitted_once_they_are_compiled_too(gpu, x):
    session = gpu.session({"x": x})
    step = session.jax_step(doubled)
    step()
    with jax.disable_jit(), pytest.raises(RuntimeError, match="jax_disable_jit"):
        step()
    assert step().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_what_is_let_go_before_the_export_and_after_it(gpu, x, monkeypatch):
    """The ticket while XLA launches; old results only when it has, because others may get their memory at once."""

    def punch(ticket, stream):
        array = jnp.zeros(16, jnp.int32)
        weakref.finalize(array, gpu.log.append, "ticket let go")
        return array

    def await_result(array, stream):
        gpu.log.append("export")
        weakref.finalize(array, gpu.log.append, "result let go")
        return torch.from_dlpack(array)

    monkeypatch.setattr(_fence.Ticket, "punch", punch)
    monkeypatch.setattr(_steps, "await_result", await_result)
    session = gpu.session({"x": x})
    step = session.jax_step(doubled)
    step()
    gc.collect()
    gpu.log.clear()
    step()
    assert gpu.log == ["ticket let go", "export", "result let go"]


def test_a_step_makes_the_sessions_device_the_current_one(gpu, x, monkeypatch):
    """Unless it is, or torch has no other."""
    session = gpu.session({"x": x})
    steps = [session.jax_step(doubled), session.torch_step(lambda buffers: None)]
    monkeypatch.setattr(Session, "_on_device", lambda session: _session.nullcontext(gpu.log.append("device")))
    for only_device, current, expected in [(False, 1, 2), (False, session._index, 0), (True, 1, 0)]:
        session._only_device = only_device
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        for step in steps:
            step()
        assert gpu.log.count("device") == expected
        gpu.log.clear()
