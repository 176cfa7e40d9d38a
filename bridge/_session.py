"""``Session``: buffers that both frameworks work on, steps in a right order, and memory that lives as long as it must.

What can go wrong between two frameworks on one GPU, and what a step does about it:

* JAX reads before torch has written: the step imports a ticket, which JAX's program waits for.
* torch overwrites before JAX has read: the step exports a result, which torch's current stream waits for.
* A block is reused while the other side still works on it: the session holds buffers, arguments and results until a
  later step has ordered their reuse.
* Two threads or two streams write while a step runs: only a ``turn`` lets another thread or stream in.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax import dlpack

from bridge._buffers import Buffer, register
from bridge._devices import check_not_capturing, jax_device_of
from bridge._fence import Ticket
from bridge._retained import Retained
from bridge._steps import JaxStep, TorchStep
from bridge._versions import check_order_tested


class Session:
    """Persistent buffers registered once, on one device, for steps of either framework.

    A step sees all torch work that its thread's current stream holds, and torch work queued after it on that stream
    waits for it; one crossing each way orders all buffers, so that the supported grain is one step of a whole model.

    Args:
        buffers: names to tensors, arrays, caches of either framework, or trees (lists, dicts) of them, all on one
            device. JAX arrays are handed over: their memory stays JAX's, but use ``tensors`` and ``arrays`` from now
            on, because JAX believes that they do not change.
        copy: allow what needs a copy: on the CPU JAX cannot update borrowed memory in place, so a ``jax_step`` with
            ``updates`` copies the updated buffers back there.
        allow_untested: run on a GPU with versions of torch and jax whose order was never tested.

    Attributes:
        device: torch's name of the device.
        tensors: the buffers as tensors and ``swa_torch.PagedCache``s, by name.

    Raises:
        TypeError, ValueError, NotImplementedError: a buffer cannot be shared, as ``to_jax`` and ``to_torch``.
        RuntimeError: versions whose order on a GPU was not tested, or a stream under capture.
    """

    def __init__(self, buffers: Mapping[str, Any], *, copy: bool = False, allow_untested: bool = False) -> None:
        self._buffers: dict[str, Buffer] = register(buffers)
        devices = {tensor.device for buffer in self._buffers.values() for tensor in buffer.tensors}
        if len(devices) != 1:
            raise ValueError(
                "buffers must be on one device (make one session a device, with that device's shards), got "
                + (", ".join(sorted(map(str, devices))) or "no arrays")
            )
        (self.device,) = devices
        self.copy = copy
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            check_order_tested(allow_untested)
        check_not_capturing(self.device)
        self.jax_device = jax_device_of("buffers", self.device)
        self._ticket = Ticket(self.device)
        self._lock = threading.RLock()
        self._open = True
        self._user: tuple[int, torch.cuda.Stream | None] | None = None
        self._retained = Retained()
        with self._on_device():
            for buffer in self._buffers.values():
                buffer.view()

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The buffers as torch's, by name."""
        return MappingProxyType({name: buffer.tree for name, buffer in self._buffers.items()})

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The buffers as JAX's, by name: imported anew, so that programs that use them see what torch has written."""
        with self._lock, self._on_device():
            self._enter()
            return MappingProxyType(
                {
                    name: jax.tree.unflatten(
                        buffer.structure, [dlpack.from_dlpack(tensor, copy=False) for tensor in buffer.tensors]
                    )
                    for name, buffer in self._buffers.items()
                }
            )

    @property
    def pointers(self) -> Mapping[str, list[tuple[int, int]]]:
        """For each buffer its addresses, (torch's, JAX's): equal, always."""
        return {
            name: [
                (tensor.data_ptr(), array.unsafe_buffer_pointer())
                for tensor, array in zip(buffer.tensors, buffer.arrays, strict=True)
            ]
            for name, buffer in self._buffers.items()
        }

    def jax_step(self, function: Callable[..., Any], *, updates: Sequence[str] = ()) -> JaxStep:
        """Return a step that runs a JAX function from torch code.

        ``function(buffers, *args, **kwargs)`` is jitted; ``buffers`` is a dict of JAX's views by name. It returns a
        tree of arrays, which the step returns as tensors on JAX's memory: reading them is ordered, and so is whatever
        torch does next on its current stream. Each tensor among ``args`` costs an import, each result an export:
        register what is the same every step, and return one result.

        Args:
            function: a pure function.
            updates: names of buffers that the function replaces. It then returns ``(results, {name: new buffer})``;
                the old buffers are donated and JAX writes into the registered memory, in place. On the CPU, where it
                cannot, the new buffers are copied back, which the session must allow (``copy=True``).

        Returns:
            The step. Its calls raise RuntimeError under graph capture, after ``close``, or on a thread or stream that
            does not have its turn.

        Raises:
            ValueError: no such buffer, or ``updates`` on the CPU without ``copy=True``.
        """
        names = (updates,) if isinstance(updates, str) else tuple(updates)
        for name in names:
            if name not in self._buffers:
                raise ValueError(
                    f"updates must name buffers of this session ({', '.join(self._buffers)}), got {name!r}"
                )
        if len(set(names)) != len(names):
            raise ValueError(f"updates must name each buffer once, got {names}")
        if names and not self.on_gpu and not self.copy:
            size = sum(tensor.nbytes for name in names for tensor in self._buffers[name].tensors)
            raise ValueError(
                "updates must be empty on the CPU, where JAX cannot write borrowed memory in place: let torch append, "
                f"or make the session with copy=True, which copies {size} bytes back every step, got updates={names}"
            )
        return JaxStep(self, function, names)

    def torch_step(self, function: Callable[..., Any]) -> TorchStep:
        """Return a step that runs a torch function from JAX code.

        ``function(buffers, *args, **kwargs)`` runs eagerly on torch's current stream; ``buffers`` is a dict of torch's
        views by name, which it may write to. JAX arrays among ``args`` arrive as tensors, torch waits for them; tensors
        in what it returns become arrays, and JAX programs that use one of them run after the whole step. So do this
        session's later JAX steps.

        Args:
            function: any torch code; no gradients.
        """
        return TorchStep(self, function)

    @contextmanager
    def turn(self) -> Iterator[Session]:
        """Take the buffers for this thread and torch's current stream, until the end of the block.

        Needed where several threads or streams write to the buffers: inside, this stream comes after all that the last
        user's stream holds, JAX's work included, and other threads wait.

        Raises:
            RuntimeError: the stream is under capture, or the session is closed.
        """
        with self._lock, self._on_device():
            self._check_open()
            check_not_capturing(self.device)
            stream = self._current_stream()
            user = (threading.get_ident(), stream)
            before = self._user[1] if self._user is not None else None
            if stream is not None and before is not None and before != stream:
                stream.wait_stream(before)
            self._user = user
            yield self

    def close(self) -> None:
        """Wait until both frameworks are done with the buffers, and let JAX's views go. Twice is once."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            if self._user is not None and self._user[1] is not None:
                self._user[1].synchronize()
            self._retained.clear()
            for buffer in self._buffers.values():
                buffer.arrays = []

    def _enter(self) -> torch.cuda.Stream | None:
        """Return the stream of a step, after checking that the caller has the turn. The caller holds the lock."""
        self._check_open()
        check_not_capturing(self.device)
        stream = self._current_stream()
        thread = threading.get_ident()
        if self._user is None:
            self._user = (thread, stream)
        elif thread != self._user[0] or stream != self._user[1]:
            other = "thread" if thread != self._user[0] else "stream"
            raise RuntimeError(
                f"this session's buffers belong to another {other} at the moment, and what this one did to them is "
                "not ordered: put writes and step into `with session.turn():` here"
            )
        return stream

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the session must be open, got one that was closed")

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.on_gpu else None

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device torch's current one: torch exports from that alone."""
        if self.on_gpu and self.device.index != torch.cuda.current_device():
            return torch.cuda.device(self.device)
        return nullcontext()

    def __del__(self) -> None:
        # JAX may give its memory away as soon as nothing refers to it, whatever torch's streams still hold.
        if getattr(self, "_open", False) and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({', '.join(self._buffers)}; {self.device})"
