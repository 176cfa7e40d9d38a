"""Launching a compiled Triton kernel past the Python around it.

Triton's own way costs more than the launch itself: it looks up scratch memory, metadata and hooks at every launch. What
that comes to is found once for each kernel, by asking Triton's launcher rather than by knowing its releases; any
launcher that holds something unknown is called as Triton's documentation has it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

Addresses = list[Any]
Run = Callable[[int, Addresses], object]

_KNOWN_STATE = {
    "launch", "num_ctas", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature",
    "global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align", "gsan_enabled",
}  # fmt: skip
_WORK_AT_EACH_LAUNCH = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
"""What makes a launcher allocate or look up something anew, where it is set."""


def make_run(compiled: Any, grid: tuple[int, int, int], places: list[int], numbers: list[Any]) -> Run:
    """Return ``run(stream, addresses)``, which launches a compiled kernel without telling Triton's hooks.

    The kernel's arguments are the addresses at ``places`` (two or more), then ``numbers``. Ask ``is_hooked`` before.
    """
    pick = itemgetter(*places)
    launcher = getattr(compiled, "run", None)
    state = getattr(launcher, "__dict__", {})
    if "launch" in state and state.keys() <= _KNOWN_STATE and not any(state.get(name) for name in _WORK_AT_EACH_LAUNCH):
        # The launcher in Python calls a function in C: which arguments does it pass?
        launch = state["launch"]
        stream, arguments = object(), [object() for _ in range(len(places) + len(numbers))]
        passed: list[Any] = []
        asked = copy.copy(launcher)
        asked.launch = lambda *values: passed.extend(values)  # pyright: ignore[reportOptionalMemberAccess]
        asked(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)  # pyright: ignore[reportOptionalCall]
        if stream in passed:
            at = passed.index(stream)
            before, after = passed[:at], passed[at + 1 :]
            if after[-len(arguments) :] == arguments:
                after = after[: -len(arguments)]
                return lambda stream, addresses: launch(*before, stream, *after, *pick(addresses), *numbers)
            if after[-1:] == [tuple(arguments)]:
                after = after[:-1]
                return lambda stream, addresses: launch(*before, stream, *after, (*pick(addresses), *numbers))
    runner = compiled[grid]
    return lambda stream, addresses: runner(*pick(addresses), *numbers, stream=stream)


def is_hooked() -> bool:
    """Whether a profiler of Triton's own (Proton) watches launches."""
    runtime = _runtime_knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a function that somebody put there, or none
        return enter is not None or leave is not None


def device_getter() -> Callable[[], int]:
    """Return the way to the current CUDA device that does not look first whether CUDA is initialised, as it is."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@functools.cache
def stream_getter() -> Callable[[int | None], int]:
    """Return Triton's own way to torch's current stream, which costs a tenth of a ``torch.cuda.Stream``."""
    from triton.runtime import driver

    return driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime
