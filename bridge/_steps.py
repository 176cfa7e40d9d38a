"""Steps of a session: a JAX function called from torch code, and a torch function called from JAX code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import torch

from bridge._exchange import to_jax, to_torch
from bridge._fence import await_result

if TYPE_CHECKING:
    from bridge._session import Session


class JaxStep:
    """A jitted JAX function of a session's buffers; made by ``Session.jax_step``.

    Called with torch tensors, arrays and numbers, it returns what the function returns, as tensors.
    """

    def __init__(self, session: Session, function: Callable[..., Any], updates: tuple[str, ...]) -> None:
        self._session = session
        self._function = function
        buffers = session._buffers
        self._updated = [buffers[name] for name in updates]
        self._read = [buffer for name, buffer in buffers.items() if name not in updates]
        self._traced = False
        donate = (1,) if session.on_gpu else ()
        self._jitted = jax.jit(self._run, donate_argnums=donate, keep_unused=True)
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; see ``Session.jax_step``."""
        session = self._session
        with session._lock, session._on_device():
            stream = session._enter()
            arguments: list[torch.Tensor] = []
            if args or kwargs:
                args, kwargs = jax.tree.map(lambda leaf: _argument(leaf, arguments), (args, kwargs))
            unused = session._retained.unused_results()
            ticket = session._ticket.punch(stream)
            donated = [buffer.arrays for buffer in self._updated]
            read = [buffer.arrays for buffer in self._read]
            self._traced = False
            try:
                updated, results, fence = self._jitted(ticket, donated, read, args, kwargs)
            except BaseException:
                self._restore()
                raise
            for buffer, arrays in zip(self._updated, updated, strict=True):
                buffer.arrays = arrays
            session._retained.dispatched(unused, arguments)
            tensors = self._finish(results, fence, stream)
            if self._traced:
                self._check_updated()
            return tensors

    def _run(self, ticket: Any, updated: Any, read: Any, args: Any, kwargs: Any) -> Any:
        """Trace the caller's function. Updates come first: JAX gives donated memory to the first outputs like it."""
        self._traced = True
        given = dict(zip(self._names(self._updated + self._read), [*updated, *read], strict=True))
        trees = {
            buffer.name: jax.tree.unflatten(buffer.structure, given[buffer.name])
            for buffer in self._session._buffers.values()
        }
        outcome = self._function(trees, *args, **kwargs)
        new: Any = {}
        if self._updated:
            if not isinstance(outcome, tuple) or len(outcome) != 2 or not isinstance(outcome[1], dict):
                raise TypeError(
                    "a step with updates must return (results, {name: new buffer}), "
                    f"got {jax.tree.structure(outcome) if isinstance(outcome, tuple) else type(outcome).__name__}"
                )
            outcome, new = outcome
            if set(new) != set(self._names(self._updated)):
                raise ValueError(
                    f"a step must return a new buffer for each of its updates "
                    f"({', '.join(self._names(self._updated))}), got {', '.join(map(str, new)) or 'none'}"
                )
        inputs = {id(leaf) for leaves in given.values() for leaf in leaves}
        renewed = [_renewed(buffer, new[buffer.name], inputs) for buffer in self._updated]
        taken = inputs | {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        if any(id(leaf) in taken for leaf in jax.tree.leaves(outcome)):
            raise ValueError(
                "a step must return what it computed, because what it was given tells nothing about when it is done, "
                "got a buffer or an argument among its results (buffers are in session.tensors)"
            )
        return renewed, outcome, () if jax.tree.leaves(outcome) else (ticket[:1] + 1,)

    def _finish(self, results: Any, fence: Any, stream: torch.cuda.Stream | None) -> Any:
        """Return the results as tensors, which orders torch's current stream after the whole program."""
        session = self._session
        leaves, structure = jax.tree.flatten(results)
        tensors = []
        for array in (*leaves, *fence):
            tensor = await_result(array, stream)
            tensors.append(tensor)
            if session.on_gpu:
                session._retained.result(tensor, array)
        if not session.on_gpu and self._updated:
            self._copy_back()
        return jax.tree.unflatten(structure, tensors[: len(leaves)])

    def _copy_back(self) -> None:
        """Bring updates home to the buffers' memory, which JAX's CPU client cannot write."""
        for buffer in self._updated:
            for tensor, array in zip(buffer.tensors, buffer.arrays, strict=True):
                tensor.copy_(torch.from_dlpack(array.block_until_ready()))
            buffer.view()

    def _check_updated(self) -> None:
        """Check that updates were written in place; what a compiled program does there, it does on every step."""
        for buffer in self._updated:
            for tensor, array in zip(buffer.tensors, buffer.arrays, strict=True):
                if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
                    self._restore()
                    raise RuntimeError(
                        f"JAX updated buffers[{buffer.name!r}] in memory of its own, not in place, so that torch does "
                        f"not see it (jax {jax.__version__})"
                    )

    def _restore(self) -> None:
        """View again what a failed step may have taken."""
        for buffer in self._updated:
            if any(array.is_deleted() for array in buffer.arrays) or self._traced:
                buffer.view()

    @staticmethod
    def _names(buffers: list[Any]) -> list[str]:
        return [buffer.name for buffer in buffers]


class TorchStep:
    """A torch function of a session's buffers, called from JAX code; made by ``Session.torch_step``."""

    def __init__(self, session: Session, function: Callable[..., Any]) -> None:
        self._session = session
        self._function = function
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; see ``Session.torch_step``."""
        session = self._session
        with session._lock, session._on_device():
            session._enter()
            arrays: list[jax.Array] = []
            args, kwargs = jax.tree.map(lambda leaf: _to_torch_argument(leaf, arrays), (args, kwargs))
            results = self._function(dict(session.tensors), *args, **kwargs)
            del args, kwargs
            if session.on_gpu:
                session._retained.read_by_torch(arrays)
            return jax.tree.map(lambda leaf: to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf, results)


def _argument(leaf: Any, arguments: list[torch.Tensor]) -> Any:
    """Return an argument of a JAX step; a tensor is imported, and its memory kept from early reuse."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    array = to_jax(leaf)
    arguments.append(leaf)
    if leaf.device.type == "cuda":
        # Wherever it was allocated, it is not reused before this stream, which will have waited for JAX.
        leaf.record_stream(torch.cuda.current_stream(leaf.device))
    return array


def _to_torch_argument(leaf: Any, arrays: list[jax.Array]) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    arrays.append(leaf)
    return to_torch(leaf)


def _renewed(buffer: Any, tree: Any, inputs: set[int]) -> list[Any]:
    """Return the arrays of an updated buffer, checked against the memory that they will be written to."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != buffer.structure:
        raise ValueError(
            f"the new buffers[{buffer.name!r}] must have the structure it was registered with ({buffer.structure}), "
            f"got {structure}"
        )
    for leaf, old in zip(leaves, buffer.arrays, strict=True):
        if leaf.shape != old.shape or leaf.dtype != old.dtype:
            raise ValueError(
                f"the new buffers[{buffer.name!r}] must keep its shape and dtype, {old.dtype.name}{list(old.shape)}, "
                f"got {leaf.dtype.name}{list(leaf.shape)}"
            )
    # An input returned as it is would be handed through, not written: behind a barrier it stays in its place.
    return [jax.lax.optimization_barrier(leaf) if id(leaf) in inputs else leaf for leaf in leaves]
