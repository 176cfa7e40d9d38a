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
        launch, count = state["launch"], len(places) + len(numbers)
        found = _ask(launcher, compiled, grid, count)
        # What differs from launch to launch would be lost.
        if found is not None and found == _ask(launcher, compiled, grid, count):
            before, after, packed = found
            if packed:
                return lambda stream, addresses: launch(*before, stream, *after, (*pick(addresses), *numbers))
            return lambda stream, addresses: launch(*before, stream, *after, *pick(addresses), *numbers)
    runner = compiled[grid]
    return lambda stream, addresses: runner(*pick(addresses), *numbers, stream=stream)


def _ask(
    launcher: Any, compiled: Any, grid: tuple[int, int, int], count: int
) -> tuple[list[Any], list[Any], bool] | None:
    """Return what a launcher in Python passes to its function in C, without launching; None where it is unclear.

    That is what comes before the stream, what comes between it and the kernel's ``count`` arguments, and whether these
    are one tuple.
    """
    stream, arguments = object(), [object() for _ in range(count)]
    passed: list[Any] = []
    asked = copy.copy(launcher)
    asked.launch = lambda *values: passed.extend(values)
    asked(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    if stream not in passed:
        return None
    at = passed.index(stream)
    before, after = passed[:at], passed[at + 1 :]
    if after[-count:] == arguments:
        return before, after[:-count], False
    if after[-1:] == [tuple(arguments)]:
        return before, after[:-1], True
    return None


def is_hooked() -> bool:
    """Whether a profiler of Triton's own (Proton) watches launches."""
    runtime, chain = _hooks()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if type(enter) is chain and type(leave) is chain:
        return bool(enter.calls or leave.calls)
    return enter is not None or leave is not None  # what somebody put there, or none


def device_getter() -> Callable[[], int]:
    """Return the way to the current CUDA device that does not look first whether CUDA is initialised, as it is."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@functools.cache
def stream_getter() -> Callable[[int | None], int]:
    """Return the way to the address of torch's current stream, which costs a tenth of a ``torch.cuda.Stream``."""
    found = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if found is None:
        from triton.runtime import driver

        found = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
    return found


@functools.cache
def _hooks() -> tuple[Any, Any]:
    """Return where Triton's hooks are, and the class of a chain of them."""
    from triton import knobs

    return knobs.runtime, getattr(knobs, "HookChain", None)
