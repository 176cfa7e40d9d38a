"""What a framework has to do for a replay: hold a cache, append, decode, and show what it did.

The engine speaks NumPy and page numbers only, so that PyTorch, JAX, or both in turn on one cache, are implementations
of this one class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bridge._replay.crossing import Difference, Sharing
from swa_plan import DeviceProfile, Plan

StepTimes = tuple[float, float]
"""Microseconds of (append, attention) of one step, all layers together."""


@dataclass(frozen=True)
class Compilation:
    """What was compiled before it ran; none of it is in the times of steps.

    Attributes:
        programs: compiled programs.
        time_s: host time that it took.
    """

    programs: int
    time_s: float


@dataclass(frozen=True)
class RowsSeen:
    """One request's share of the last step, on the host, in the dtypes of the device (ml_dtypes where NumPy has none).

    Attributes:
        query: ``[query_len, heads, k_dim]``.
        gate: ``[query_len, heads]``, or None.
        key: ``[query_len, kv_heads, k_dim]`` that was appended.
        value: ``[query_len, kv_heads, v_dim]`` that was appended.
        key_cache: ``[pages, block, kv_heads, k_dim]``, the pages asked for.
        value_cache: ``[pages, block, kv_heads, v_dim]``.
        outs: ``[query_len, heads, v_dim]`` by the framework that decoded them: the step's own first, and where two
            share the cache, the other's from the same bytes.
    """

    query: np.ndarray
    gate: np.ndarray | None
    key: np.ndarray
    value: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    outs: dict[str, np.ndarray]


class Runner(Protocol):
    """A cache and a decode step on some framework.

    Attributes:
        backend: what runs, such as ``triton`` or ``xla``.
        framework: its framework and version in words.
        device: the device in words.
        profile: the device for the roofline, or None where there is none to speak of.
        clock: how times are taken, in words.
        options: keyword arguments of ``swa_decode`` on the host: sinks, k_scale and v_scale where used.
    """

    backend: str
    framework: str
    device: str
    profile: DeviceProfile | None
    clock: str
    options: dict[str, Any]

    def padded(self, requests: int) -> int:
        """Return the batch that a step of so many requests is padded to: at most ``max_batch``, and few values."""
        ...

    def compilation(self) -> Compilation | None:
        """Return what was compiled so far, or None where that is not counted."""
        ...

    def sharing(self) -> Sharing | None:
        """Return what two frameworks on one cache have shared, after ``finish``, or None where there is but one."""
        ...

    def plan(self, bucket: int) -> Plan:
        """Return the plan that serves a padded batch."""
        ...

    def set_table(self, rows: np.ndarray, entries: np.ndarray) -> None:
        """Overwrite rows of the block table on the device with int32 ``[rows, max_blocks]``."""
        ...

    def prefill(self, slots: np.ndarray) -> None:
        """Append random keys and values at int32 ``slots``, in every layer."""
        ...

    def poison(self, pages: np.ndarray) -> None:
        """Fill freed pages with NaN (integers: their largest value), in every layer."""
        ...

    def step(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> Callable[[], StepTimes]:
        """Append ``query_len`` new tokens a request and decode their rows, layer after layer.

        Args:
            slot_mapping: int32 ``[bucket * query_len]``.
            seq_lens: int32 ``[bucket]``.

        Returns:
            A function that tells how long it took; it may wait for the device.
        """
        ...

    def compare(self, requests: int) -> Difference | None:
        """Decode the last step the other way too and compare the rows of its first ``requests`` requests.

        Returns:
            What was found, or None where there is one way only.
        """
        ...

    def rows_seen(self, row: int, pages: np.ndarray, layer: int) -> RowsSeen:
        """Return what request ``row`` gave and got in the last step."""
        ...

    def padding_is_zero(self, requests: int) -> bool:
        """Tell whether the last step has zeros in all rows after ``requests`` requests' rows, whoever decoded."""
        ...

    def finish(self) -> None:
        """Wait until the device is done."""
        ...
