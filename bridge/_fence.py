"""The two crossings of a step: a ticket that JAX programs wait for, and a result that torch's stream waits for.

On a GPU an imported array carries an event of the stream that JAX was given, and a program that takes the array waits
for it: importing one small tensor on each step orders the whole program after everything that torch's current stream
holds. In the other direction an export makes the consumer's stream wait for the program. Both are DLPack's own
protocol; what is saved here is the work that ``Tensor.__dlpack__`` repeats for every tensor.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax import dlpack
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from bridge._devices import LEGACY_DEFAULT_STREAM

_DLPACK_CUDA = 2
_TICKET_VALUES = 16
"""A multiple of 16 bytes, however it is aligned."""


class Ticket:
    """A small tensor that JAX imports on every step; it implements DLPack's producer side.

    The event and the wrappers of JAX's streams are made once. Only one thread may use it at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._place = _DLPACK_CUDA, device.index
        self._tensor = torch.zeros(_TICKET_VALUES, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_gpu else None
        self._streams: dict[int, torch.cuda.ExternalStream] = {}
        self._stream: torch.cuda.Stream | None = None
        self._still = None if self._on_gpu else dlpack.from_dlpack(self._tensor, copy=False)

    def punch(self, stream: torch.cuda.Stream | None) -> jax.Array:
        """Return an array; a JAX program that takes it runs after what torch's ``stream`` holds now.

        On the CPU torch has finished already, and the same array serves every step.
        """
        if self._still is not None:
            return self._still
        self._stream = stream
        return dlpack.from_dlpack(self, copy=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        assert self._event is not None
        if stream is None:
            raise RuntimeError("JAX gave no stream to order by, so the step cannot be ordered")
        waiting = self._streams.get(stream)
        if waiting is None:
            waiting = self._streams[stream] = torch.cuda.ExternalStream(stream, device=self._device)
        self._event.record(self._stream)
        self._event.wait(waiting)
        return to_dlpack(self._tensor)


def await_result(array: jax.Array, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """Return a tensor on a result's memory; torch's ``stream``, or on the CPU the caller, waits for it."""
    if stream is None:
        return torch.from_dlpack(array.block_until_ready())
    capsule = array.__dlpack__(stream=stream.cuda_stream or LEGACY_DEFAULT_STREAM)  # pyright: ignore[reportCallIssue]
    return torch.from_dlpack(capsule)
