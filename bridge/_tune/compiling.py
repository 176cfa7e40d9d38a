"""Compiling the kernels of many plans: by several processes, whose work Triton's cache on disk hands to this one."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from bridge._tune.sample import distinct_kernels, kernel_of
from swa_plan import Plan

MOST_PROCESSES = 15

START_S, KERNEL_S, ENDING_S = 120.0, 30.0, 10.0
"""How long a process may take to start, for each kernel, and to end when told to; far more than any needs."""


def default_processes() -> int:
    """Return how many processes compile here: one for each core but one."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))


def compile_plans(plans: Sequence[Plan], processes: int) -> int:
    """Compile each kernel of ``plans`` once; return how many there are.

    A process that fails, or hangs and is ended, leaves its kernels to the one that measures.
    """
    kernels = distinct_kernels(plans)
    shares = [share for first in range(processes) if (share := kernels[first::processes])]
    if len(shares) > 1:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=compile_share, args=(share, visible_device()), daemon=True) for share in shares
        ]
        for worker in workers:
            worker.start()
        end = time.monotonic() + START_S + KERNEL_S * max(map(len, shares))
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
            if worker.is_alive():
                worker.terminate()
                worker.join(ENDING_S)
            if worker.is_alive():
                worker.kill()
    return len(kernels)


def visible_device() -> int:
    """Return the current CUDA device."""
    import torch

    return torch.cuda.current_device()


def compile_share(plans: Sequence[Plan], device: int) -> None:
    """Compile plans by calling each of them once, on one request; those that there is no memory for are left out."""
    import torch

    from bridge._tune.tensors import decode, make_tensors

    torch.cuda.set_device(device)
    for plan in plans:
        try:
            tensors = make_tensors(plan.problem, requests=1, sets=1)
            runs(lambda plan=plan, tensors=tensors: decode(tensors, plan, 0))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed from, says that the device's memory is full.

    A capture that fails for it ends in an error of its own, and the driver's has no class.
    """
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def runs(call: Callable[[], Any]) -> bool:
    """Make a call; return False where its kernel does not fit this device or its compiler refuses it."""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        call()
    except (OutOfResources, PTXASError):
        return False
    return True


class Spills:
    """How many registers each kernel spills, as the compiled kernels say; asked of each plan after its first call."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._seen: set[int] = set()

    def of(self, plan: Plan) -> int:
        """Return what the kernel of a plan spills; 0 where nothing is known."""
        key = kernel_of(plan)
        new = [kernel for kernel in split_kernels() if id(kernel) not in self._seen]
        self._seen.update(map(id, new))
        if len(new) == 1:
            self._known[key] = int(getattr(new[0], "n_spills", None) or 0)
        return self._known.get(key, 0)


def split_kernels() -> list[Any]:
    """Return the compiled split kernels of this process, or none where this Triton keeps them elsewhere."""
    from swa_torch._triton._split import swa_decode_split

    caches = getattr(swa_decode_split, "device_caches", {})
    return [kernel for cache in caches.values() for kernel in cache[0].values()]
