"""Triton's launchers without a GPU: their own Python, around functions that note what the one in C would get."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

STATE = {
    "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": ["annotation"],
    "kernel_signature": b"signature", "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
    "profile_scratch_align": 1, "gsan_enabled": False,
}  # fmt: skip
"""What a launcher of a kernel that needs no scratch holds, in any release of Triton."""


class Launcher:
    """A launcher as Triton 3.6 has it, where every argument of the kernel is one of the function in C."""

    def __init__(self, launch: Callable[..., None], **state: Any) -> None:
        self.__dict__.update({**STATE, "launch": launch, **state})

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(
            gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *args
        )


class PackingLauncher(Launcher):
    """A launcher as later releases have it, where the kernel's arguments are one tuple."""

    def __call__(self, gridX, gridY, gridZ, stream, function, metadata, launch_metadata, enter, leave, *args):
        self.launch(
            gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, metadata,
            launch_metadata, enter, leave, None, None, self.arg_annotations, self.kernel_signature, args,
        )  # fmt: skip


class Compiled(SimpleNamespace):
    """A compiled kernel with a launcher; ``documented`` are the launches that were asked for as documented."""

    def __init__(self, run: object) -> None:
        super().__init__(run=run, function=11, packed_metadata=(4, 1, 0), documented=[])

    def __getitem__(self, grid):
        return lambda *values, stream: self.documented.append((grid, stream, values))
