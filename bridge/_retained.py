"""What a session keeps alive although its user dropped it, because the other framework may still work on it.

Both allocators give memory that is free on the host to whoever asks next, and order that by their own stream alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import torch

_Result = tuple[weakref.ref[torch.UntypedStorage], jax.Array, torch.cuda.Stream]
"""A reference that is dead when no tensor views the memory, the array that keeps it, and the stream that reads it.

torch keeps a storage's Python object for as long as the storage, whoever holds it (``tests/bridge/test_storages.py``).
"""


class Retained:
    """References, and when each may be let go.

    * Results that torch reads in JAX's memory: until a JAX step that began after the last view of them was gone, and
      after the stream they were made on, has been dispatched. It waited for the reads, and whoever gets the memory
      next comes after it.
    * Arguments that torch reads in JAX's memory: until an event recorded after the reads has passed.

    Arguments that JAX reads in torch's memory need no reference: torch's allocator is told which stream waits for JAX.
    """

    def __init__(self) -> None:
        self._results: list[_Result] = []
        self._read: list[tuple[torch.cuda.Event, list[jax.Array]]] = []

    def __len__(self) -> int:
        return len(self._results) + len(self._read)

    def unused_results(self, stream: torch.cuda.Stream | None) -> list[_Result]:
        """Return the results that no tensor views any more; ``stream`` waits for the streams that may read them."""
        unused = [result for result in self._results if result[0]() is None]
        if stream is not None:
            for reader in {result[2] for result in unused if result[2] is not stream and result[2] != stream}:
                stream.wait_stream(reader)
        return unused

    def dispatched(self, unused: list[_Result]) -> None:
        """Let go what the step just dispatched was ordered after."""
        if unused:
            gone = {id(result) for result in unused}
            self._results = [result for result in self._results if id(result) not in gone]
        if self._read:
            self._drop_read()

    def result(self, tensor: torch.Tensor, array: jax.Array, stream: torch.cuda.Stream) -> None:
        """Keep a result while a tensor views it, and longer."""
        self._results.append((weakref.ref(tensor.untyped_storage()), array, stream))

    def read_by_torch(self, arrays: list[jax.Array]) -> None:
        """Keep arrays until torch's current stream has passed this point."""
        self._drop_read()
        if arrays:
            event = torch.cuda.Event()
            event.record()
            self._read.append((event, arrays))

    def close(self, device: torch.device) -> None:
        """Let everything go but results that are still viewed; the caller has waited for the device."""
        for storage, array, _ in self._results:
            outlive(lambda storage=storage: storage() is None, device, array)
        self._results.clear()
        self._read.clear()

    def _drop_read(self) -> None:
        while self._read and self._read[0][0].query():
            del self._read[0]


_outliving: dict[object, tuple[Callable[[], bool], torch.device, Any]] = {}
"""No lock guards it: who holds one may be interrupted by a collection, which closes a session and comes here again."""


def outlive(unused: Callable[[], bool], device: torch.device, kept: Any) -> None:
    """Keep something beyond its session: until it is unused, and its device has been waited for after that."""
    _outliving[object()] = unused, device, kept


def release_outliving() -> None:
    """Let go what is unused by now, after waiting for its device."""
    unused = {key: each for key, each in _outliving.copy().items() if each[0]()}
    for device in {each[1] for each in unused.values()}:
        synchronise(device)
    for key in unused:
        _outliving.pop(key, None)


def synchronise(device: torch.device) -> None:
    """Wait for all streams of a device, JAX's included."""
    torch.cuda.synchronize(device)
