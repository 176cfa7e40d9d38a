"""What a session keeps alive although its user dropped it, because the other framework may still work on it.

Both allocators give memory that is free on the host to whoever asks next, and order that by their own stream alone.
"""

from __future__ import annotations

import jax
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Retained:
    """References, and when each may be let go.

    * Results that torch reads in JAX's memory: until a JAX step that began after the last view of them was gone has
      been dispatched. It waited for the reads, and whoever gets the memory next comes after it.
    * Arguments that JAX reads in torch's memory: until the next JAX step has been dispatched; by then torch's stream
      has waited for the programs that read them.
    * Arguments that torch reads in JAX's memory: until an event recorded after the reads has passed.
    """

    def __init__(self) -> None:
        self._results: list[tuple[StorageWeakRef, jax.Array]] = []
        self._arguments: list[torch.Tensor] = []
        self._read: list[tuple[torch.cuda.Event, list[jax.Array]]] = []

    def __len__(self) -> int:
        return len(self._results) + len(self._arguments) + len(self._read)

    def unused_results(self) -> list[int]:
        """Return which results no tensor views any more: ``dispatched`` may let them go."""
        return [index for index, (storage, _) in enumerate(self._results) if storage.expired()]

    def dispatched(self, unused: list[int], arguments: list[torch.Tensor]) -> None:
        """Let go what the step just dispatched was ordered after, and keep its own arguments."""
        for index in reversed(unused):
            del self._results[index]
        self._arguments = arguments
        while self._read and self._read[0][0].query():
            del self._read[0]

    def result(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Keep a result while a tensor views it, and longer."""
        self._results.append((StorageWeakRef(tensor.untyped_storage()), array))

    def read_by_torch(self, arrays: list[jax.Array]) -> None:
        """Keep arrays until torch's current stream has passed this point."""
        while self._read and self._read[0][0].query():
            del self._read[0]
        if arrays:
            event = torch.cuda.Event()
            event.record()
            self._read.append((event, arrays))

    def clear(self) -> None:
        """Let everything go; the caller has waited for both frameworks."""
        self._results.clear()
        self._arguments.clear()
        self._read.clear()
