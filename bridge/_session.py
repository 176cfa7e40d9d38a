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

from bridge._buffers import Buffer, register
from bridge._devices import CAPTURE_RECIPE, check_not_capturing, is_capturing, jax_device_of, on_device
from bridge._exchange import check_outside_traces
from bridge._fence import Ticket
from bridge._retained import Retained, outlive, release_outliving, synchronise
from bridge._steps import JaxStep, TorchStep
from bridge._versions import check_order_tested, check_versions

_stream_id: Callable[[int], object] = getattr(torch._C, "_cuda_getCurrentStream", torch.cuda.current_stream)
"""Returns what tells torch's current stream on a device from others, and costs less than a ``torch.cuda.Stream``."""


class Session:
    """Persistent buffers registered once, on one device, for steps of either framework.

    A step sees all torch work that its thread's current stream holds, and torch work queued after it on that stream
    waits for it; one crossing each way orders all buffers, so that the supported grain is one step of a whole model.

    Args:
        buffers: names to tensors, arrays, caches of either framework, or trees (lists, dicts) of them, all on one
            device. JAX arrays are handed over: their memory stays JAX's, but use ``tensors`` and ``arrays`` from now
            on, because JAX believes that they do not change. One open session for one memory: another would order
            nothing with it.
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
        # What every step asks is asked once here: torch.device answers in C++ that little else keeps in the cache.
        self._index = self.device.index
        self._host = None if self.on_gpu else self.device
        self._only_device = not self.on_gpu or torch.cuda.device_count() == 1  # torch's current one is no other
        check_versions()
        if self.on_gpu:
            check_order_tested(allow_untested)
        check_outside_traces("a Session")
        with self._on_device():
            check_not_capturing(self.device)
        self.jax_device = jax_device_of("buffers", self.device)
        self._ticket = Ticket(self.device)
        self._lock = threading.RLock()
        self._turns = 0
        self._user: tuple[int | None, torch.cuda.Stream | None] = (None, self._current_stream())
        self._place: object = None  # where the user's last step came from
        self._retained = Retained()
        self._tensors = [tensor for buffer in self._buffers.values() for tensor in buffer.tensors]
        self._addresses = [address for buffer in self._buffers.values() for address in buffer.addresses]
        release_outliving()
        with self._on_device():
            for buffer in self._buffers.values():
                buffer.view()
        self._open = True

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The buffers as torch's, by name, in containers of their own: write into the tensors, not into those."""
        return MappingProxyType({name: buffer.tree() for name, buffer in self._buffers.items()})

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The buffers as JAX's, by name: imported anew, so that programs that use them see what torch has written.

        Nothing orders torch's next writes after such programs, on the CPU neither: wait for their results first
        (``jax.block_until_ready``), or make them a step.
        """
        with self._lock, self._on_device():
            self._enter()
            return MappingProxyType(
                {
                    name: jax.tree.unflatten(buffer.structure, buffer.imported())
                    for name, buffer in self._buffers.items()
                }
            )

    @property
    def pointers(self) -> Mapping[str, list[tuple[int, int]]]:
        """For each buffer its addresses, (torch's, JAX's): equal, or a step would refuse."""
        with self._lock:
            self._check_open()
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
            function: a pure function. What it is given it does not return: only what is computed tells when.
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
        views by name, which it may write to, in place. JAX arrays among ``args`` arrive as tensors, to be read only;
        torch waits for them. Tensors in what it returns become arrays, and JAX programs that use one of them run after
        the whole step. So do this session's later JAX steps.

        Args:
            function: any torch code; no gradients. It returns tensors of its own, not buffers or views of them.
        """
        return TorchStep(self, function)

    @contextmanager
    def turn(self) -> Iterator[Session]:
        """Take the buffers for this thread and torch's current stream, until the end of the block.

        Needed where several threads or streams write to the buffers: inside, this stream comes after all that the last
        user's stream holds, JAX's work included, and other threads wait. A turn on another stream inside a turn is
        given back at its end; otherwise a turn is kept until another is taken.

        Raises:
            RuntimeError: the stream is under capture, inside a JAX transformation, or the session is closed.
        """
        with self._lock, self._on_device():
            self._check_usable()
            before = self._user
            self._pass_to((threading.get_ident(), self._current_stream()))
            self._turns += 1
            try:
                yield self
            finally:
                self._turns -= 1
                if self._turns:
                    self._pass_to(before)

    def close(self) -> None:
        """Wait until both frameworks are done with the device, and let JAX's views go. Twice is once.

        Results that are still viewed live on; their memory is given back at the end of a later session.

        Raises:
            RuntimeError: the stream is under capture.
        """
        with self._lock, self._on_device():
            if not self._open:
                return
            check_not_capturing(self.device)
            self._open = False
            release_outliving()
            if self.on_gpu:
                synchronise(self.device)
            self._retained.close(self.device)
            for buffer in self._buffers.values():
                buffer.arrays = []

    def _enter(self) -> torch.cuda.Stream | None:
        """Return the stream of a step, after checking that the caller has the turn. The caller holds the lock."""
        self._check_usable()
        place = (threading.get_ident(), _stream_id(self._index) if self.on_gpu else None)
        if place != self._place:
            self._begin((place[0], self._current_stream()))
            self._place = place
        # All at once, because most steps find all in place; one by one to name what is not.
        if [*map(torch.Tensor.data_ptr, self._tensors)] != self._addresses:
            for buffer in self._buffers.values():
                buffer.check_in_place()
        return self._user[1]

    def _begin(self, user: tuple[int, torch.cuda.Stream | None]) -> None:
        """Let the session's user in, or its first, and no other."""
        if user == self._user:
            return
        if self._user[0] is not None:
            other = "thread" if user[0] != self._user[0] else "stream"
            raise RuntimeError(
                f"this session's buffers belong to another {other} at the moment, and what this one did to them is "
                "not ordered: put writes and step into `with session.turn():` here"
            )
        self._pass_to(user)

    def _pass_to(self, user: tuple[int | None, torch.cuda.Stream | None]) -> None:
        """Make another user's stream wait for the last one's, and remember it."""
        before, stream = self._user[1], user[1]
        if before is not None and stream is not None and before != stream:
            stream.wait_stream(before)
        self._user, self._place = user, None

    def _check_usable(self) -> None:
        self._check_open()
        check_outside_traces("a step")
        # `check_not_capturing`, but for a look at the device's type, which took 4 us of every step.
        if self.device is not self._host and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURE_RECIPE)

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the session must be open, got one that was closed")

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._index) if self.on_gpu else None

    def _on_device(self) -> AbstractContextManager[Any]:
        return on_device(self.device) if self.on_gpu else nullcontext()

    def __del__(self) -> None:
        # JAX may give its memory away as soon as nothing refers to it, whatever torch's streams still hold.
        if not getattr(self, "_open", False) or sys.is_finalizing():
            return
        if is_capturing(self.device):  # which waiting would break
            outlive(lambda: True, self.device, (self._buffers, self._retained))
        else:
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({', '.join(self._buffers)}; {self.device})"
