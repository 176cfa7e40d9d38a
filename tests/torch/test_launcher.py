"""Kernels are launched with what Triton's own launcher passes, without running its Python; unknown launchers as
documented."""

import inspect
import re
from types import SimpleNamespace

import pytest

from swa_torch import _launcher
from tests.torch.launchers import STATE, Compiled, Launcher, PackingLauncher

pytest.importorskip("triton", reason="needs Triton")
driver = pytest.importorskip("triton.backends.nvidia.driver", reason="needs Triton's CUDA backend")

GRID, STREAM = (3, 2, 1), 7
ADDRESSES, PLACES, NUMBERS = [1024, 2048, None], [1, 0, 2], [0.5, 16, None, 8]
ARGUMENTS = (2048, 1024, None, 0.5, 16, None, 8)


def triton_launcher(launch, **state):
    """Return the launcher of the Triton that is installed, which cannot be made without a GPU, around ``launch``."""
    launcher = object.__new__(driver.CudaLauncher)
    launcher.__dict__.update({**STATE, "launch": launch, **state})
    return launcher


@pytest.fixture(params=[Launcher, PackingLauncher, triton_launcher])
def make_launcher(request, monkeypatch):
    import triton

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # later releases ask for it
    return request.param


def test_the_function_in_c_gets_what_the_launcher_passes(make_launcher):
    passed = []
    compiled = Compiled(make_launcher(lambda *values: passed.append(values)))
    compiled.run(*GRID, STREAM, compiled.function, compiled.packed_metadata, None, None, None, *ARGUMENTS)
    run = _launcher.make_run(compiled, GRID, PLACES, NUMBERS)
    assert len(passed) == 1, "asking launches nothing"
    run(STREAM, ADDRESSES)
    assert passed[0] == passed[1]
    compiled.run(*GRID, 8, compiled.function, compiled.packed_metadata, None, None, None, 4096, *ARGUMENTS[1:])
    run(8, [1024, 4096, None])
    assert passed[2] == passed[3] != passed[0]
    assert not compiled.documented


def test_the_launchers_own_python_is_passed_by(make_launcher, monkeypatch):
    compiled = Compiled(make_launcher(lambda *values: None))
    run = _launcher.make_run(compiled, GRID, PLACES, NUMBERS)

    def called(*values):
        raise AssertionError("called")

    monkeypatch.setattr(type(compiled.run), "__call__", called)
    run(STREAM, ADDRESSES)


@pytest.mark.parametrize(
    "state",
    [{"global_scratch_size": 16}, {"profile_scratch_size": 16}, {"gsan_enabled": True}, {"something_new": 0}],
    ids=lambda state: next(iter(state)),
)
def test_a_launcher_with_work_of_its_own_is_asked_as_documented(state):
    compiled = Compiled(Launcher(lambda *values: None, **state))
    _launcher.make_run(compiled, GRID, PLACES, NUMBERS)(STREAM, ADDRESSES)
    assert compiled.documented == [(GRID, STREAM, ARGUMENTS)]


class Hidden(Launcher):
    """Passes neither the stream nor the arguments as they are."""

    def __call__(self, *values):
        self.launch(str(values))


class Rearranged(Launcher):
    """Passes the arguments in another order."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(stream, *reversed(args))


class Counting(Launcher):
    """Passes a number of the launch, which is nowhere in what it holds."""

    launches = 0

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        Counting.launches += 1
        self.launch(gridX, gridY, gridZ, Counting.launches, stream, *args)


@pytest.mark.parametrize("kind", [Hidden, Rearranged, Counting])
def test_arguments_that_are_not_found_again_are_passed_as_documented(kind):
    compiled = Compiled(kind(lambda *values: None))
    _launcher.make_run(compiled, GRID, PLACES, NUMBERS)(STREAM, ADDRESSES)
    assert compiled.documented == [(GRID, STREAM, ARGUMENTS)]


def test_all_that_the_installed_launcher_holds_is_known():
    """A release with more would be launched as documented: slower, and worth a look."""
    held = set(re.findall(r"\bself\.(\w+) = ", inspect.getsource(driver.CudaLauncher.__init__)))
    assert "launch" in held
    assert held <= _launcher._KNOWN_STATE


def test_a_hook_that_is_no_chain_is_seen(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[]))  # of its own
    assert _launcher.is_hooked()


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_seen(monkeypatch, name):
    from triton import knobs

    assert not _launcher.is_hooked()
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    assert _launcher.is_hooked()
    monkeypatch.setattr(knobs.runtime, name, print)
    assert _launcher.is_hooked()
