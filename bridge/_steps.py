"""Steps of a session: a JAX function called from torch code, and a torch function called from JAX code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

import swa_pallas
import swa_torch
from bridge._buffers import Buffer
from bridge._caches import is_cache, parts, with_bases
from bridge._dtypes import check_dtype
from bridge._exchange import export_value, import_value
from bridge._fence import await_result

if TYPE_CHECKING:
    from bridge._session import Session


class _Step:
    """A function of a session's buffers, and a call of it that torch.compile leaves alone."""

    def __init__(self, session: Session, function: Callable[..., Any]) -> None:
        self._session = session
        self._function = function
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; see ``Session.jax_step`` and ``Session.torch_step``."""
        if torch.compiler.is_compiling():
            return _untraced(self._alone, args, kwargs)
        return self._alone(args, kwargs)

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step with other threads kept out, and torch's current device the session's."""
        session = self._session
        with session._lock:
            if session._only_device or torch.cuda.current_device() == session._index:
                return self._step(args, kwargs)
            with session._on_device():
                return self._step(args, kwargs)

    def _step(self, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class JaxStep(_Step):
    """A jitted JAX function of a session's buffers; made by ``Session.jax_step``.

    Called with tensors, arrays, caches and numbers, it returns what the function returns, as tensors.
    """

    def __init__(self, session: Session, function: Callable[..., Any], updates: tuple[str, ...]) -> None:
        super().__init__(session, function)
        buffers = session._buffers
        self._updated = [buffers[name] for name in updates]
        self._read = [buffer for name, buffer in buffers.items() if name not in updates]
        self._traced = False

        def run(ticket: Any, updated: Any, read: Any, args: Any, kwargs: Any) -> Any:
            return self._run(ticket, updated, read, args, kwargs)

        run.__name__ = f"swa_step_{getattr(function, '__name__', 'of').strip('<>')}"  # what profiles show
        self._jitted = jax.jit(run, donate_argnums=(1,) if session.on_gpu else (), keep_unused=True)

    def _step(self, args: Any, kwargs: Any) -> Any:
        session = self._session
        retained = session._retained
        stream = session._enter()
        if args or kwargs:
            args, kwargs = self._arguments(args, kwargs, stream)
        unused = retained.unused_results(stream)
        ticket = session._ticket.punch(stream)
        self._traced = False
        outcome: Any = ()
        try:
            outcome = self._jitted(
                ticket,
                [buffer.arrays for buffer in self._updated],
                [buffer.arrays for buffer in self._read],
                args,
                kwargs,
            )
            # XLA launches meanwhile, which the export waits for: what is done before it costs nothing. Only ``unused``
            # is held until then, or another thread's program might get its memory and be launched before this one.
            updated, results, fence = outcome
            for buffer, arrays in zip(self._updated, updated, strict=True):
                buffer.arrays = arrays
            del ticket
            retained.dispatched(unused)
            tensors = self._finish(results, fence, stream)
            if self._traced:
                self._check_updated()
        except BaseException:
            self._recover(outcome)
            raise
        return tensors

    def _arguments(self, args: Any, kwargs: Any, stream: torch.cuda.Stream | None) -> Any:
        """Return a call's arguments as JAX's, checked."""
        session = self._session

        def argument(path: Any, leaf: Any) -> Any:
            ours = isinstance(leaf, (torch.Tensor, swa_torch.PagedCache))
            if not ours and not isinstance(leaf, (jax.Array, swa_pallas.PagedCache)):
                return leaf
            given = leaf
            if ours:
                for tensor in parts(leaf):
                    if tensor.device != session.device:
                        raise ValueError(f"{_name(path)} must be on {session.device}, got a tensor on {tensor.device}")
                given = import_value(_name(path), leaf)
            else:
                for array in parts(leaf):
                    if array.committed and array.devices() != {session.jax_device}:
                        raise ValueError(f"{_name(path)} must be on {session.jax_device}, got one on {array.devices()}")
            if self._updated:
                for array in parts(given):
                    _check_apart(_name(path), array, self._updated)
            if ours and stream is not None:
                for tensor in parts(leaf):
                    # Wherever it was allocated, it is not reused before this stream, which will have waited for JAX.
                    tensor.record_stream(stream)
            return given

        return jax.tree_util.tree_map_with_path(argument, (args, kwargs), is_leaf=is_cache)

    def _run(self, ticket: Any, updated: Any, read: Any, args: Any, kwargs: Any) -> Any:
        """Trace the caller's function. Updates come first: JAX gives donated memory to the first outputs like it."""
        if self._session.on_gpu and getattr(jax.config, "jax_disable_jit", False):  # or it is called, on every step
            raise RuntimeError(
                "a step must be jitted, because programs wait and functions do not: unset jax_disable_jit"
            )
        self._traced = True
        given = dict(zip(_names(self._updated + self._read), [*updated, *read], strict=True))
        trees = {
            buffer.name: jax.tree.unflatten(buffer.structure, given[buffer.name])
            for buffer in self._session._buffers.values()
        }
        outcome = self._function(trees, *args, **kwargs)
        for buffer in self._read:
            if not _is_same(jax.tree.leaves(trees.get(buffer.name)), given[buffer.name]):
                raise ValueError(
                    f"a step that replaces buffers[{buffer.name!r}] must have it among its updates and return it, "
                    f"got updates={tuple(_names(self._updated))}"
                )
        new: Any = {}
        if self._updated:
            if not isinstance(outcome, tuple) or len(outcome) != 2 or not isinstance(outcome[1], dict):
                raise TypeError(
                    "a step with updates must return (results, {name: new buffer}), "
                    f"got {jax.tree.structure(outcome) if isinstance(outcome, tuple) else type(outcome).__name__}"
                )
            outcome, new = outcome
            if set(new) != set(_names(self._updated)):
                raise ValueError(
                    f"a step must return a new buffer for each of its updates ({', '.join(_names(self._updated))}), "
                    f"got {', '.join(map(str, new)) or 'none'}"
                )
        inputs = {id(leaf) for leaves in given.values() for leaf in leaves}
        renewed = [_renewed(buffer, new[buffer.name], inputs) for buffer in self._updated]
        taken = inputs | {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        if any(id(leaf) in taken for leaf in jax.tree.leaves(outcome)):
            raise ValueError(
                "a step must return what it computed, because what it was given tells nothing about when it is done, "
                "got a buffer or an argument among its results: use session.tensors, or return jnp.copy(...) of it"
            )
        outcome = jax.tree.map(jnp.asarray, outcome)
        for leaf in jax.tree.leaves(outcome):
            check_dtype("a result of a step", leaf.dtype.name)
        return renewed, outcome, () if jax.tree.leaves(outcome) else (ticket[:1] + 1,)

    def _finish(self, results: Any, fence: Any, stream: torch.cuda.Stream | None) -> Any:
        """Return the results as tensors, which orders torch's current stream after the whole program."""
        if isinstance(results, jax.Array):  # as of most steps; to walk a tree would be a tenth of the crossing
            tensors = self._tensor(results, stream)
        else:
            tensors = jax.tree.map(lambda leaf: self._result(leaf, stream), results, is_leaf=is_cache)
        for array in fence:
            self._tensor(array, stream)
        if stream is None and self._updated:
            self._copy_back()
        return tensors

    def _result(self, leaf: Any, stream: torch.cuda.Stream | None) -> Any:
        if not isinstance(leaf, swa_pallas.PagedCache):
            return self._tensor(leaf, stream)
        return with_bases(swa_torch.PagedCache, leaf, [self._tensor(base, stream) for base in leaf.bases])

    def _tensor(self, array: jax.Array, stream: torch.cuda.Stream | None) -> torch.Tensor:
        tensor = await_result(array, stream)
        if stream is not None:
            self._session._retained.result(tensor, array, stream)
        return tensor

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
                    raise RuntimeError(
                        f"JAX updated buffers[{buffer.name!r}] in memory of its own, not in place, so that torch does "
                        f"not see it (jax {jax.__version__})"
                    )

    def _recover(self, outcome: Any) -> None:
        """After a failure: wait for what was dispatched, which nothing else waits for, and view the buffers again."""
        with contextlib.suppress(Exception):  # the failure itself, once more
            jax.block_until_ready(outcome)
        for buffer in self._updated:
            buffer.view()


class TorchStep(_Step):
    """A torch function of a session's buffers, called from JAX code; made by ``Session.torch_step``."""

    def _step(self, args: Any, kwargs: Any) -> Any:
        session = self._session
        session._enter()
        arrays: list[jax.Array] = []

        def argument(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, (jax.Array, swa_pallas.PagedCache)):
                return leaf
            arrays.extend(parts(leaf))
            return export_value(_name(path), leaf)

        args, kwargs = jax.tree_util.tree_map_with_path(argument, (args, kwargs), is_leaf=is_cache)
        given = dict(session.tensors)
        try:
            results = self._function(given, *args, **kwargs)
        finally:
            del args, kwargs
            if session.on_gpu:
                session._retained.read_by_torch(arrays)
        self._check_kept(given)
        return jax.tree.map(self._result, results, is_leaf=is_cache)

    def _check_kept(self, given: Mapping[str, Any]) -> None:
        for buffer in self._session._buffers.values():
            leaves = jax.tree.leaves(given.get(buffer.name), is_leaf=is_cache)
            if not _is_same(leaves, buffer.leaves):
                raise ValueError(
                    f"a torch step must write into buffers[{buffer.name!r}] in place (copy_), got it replaced, which "
                    "JAX does not see"
                )

    def _result(self, leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, swa_torch.PagedCache)):
            return leaf
        name = "a result of a torch step"
        array = import_value(name, leaf)
        for part in parts(array):
            _check_apart(name, part, list(self._session._buffers.values()))
        return array


_untraced: Callable[..., Any] = torch.compiler.disable(lambda run, args, kwargs: run(args, kwargs))
"""Calls what torch.compile would otherwise trace into: a step breaks the graph and runs as it is."""


def _renewed(buffer: Buffer, tree: Any, inputs: set[int]) -> list[Any]:
    """Return the arrays of an updated buffer, checked against the memory that they will be written to."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != buffer.structure:
        raise ValueError(
            f"the new buffers[{buffer.name!r}] must have the structure it was registered with ({buffer.structure}), "
            f"got {structure}"
        )
    renewed = []
    for leaf, old in zip(leaves, buffer.arrays, strict=True):
        array = jnp.asarray(leaf)
        if array.shape != old.shape or array.dtype != old.dtype:
            raise ValueError(
                f"the new buffers[{buffer.name!r}] must keep its shape and dtype, {old.dtype.name}{list(old.shape)}, "
                f"got {array.dtype.name}{list(array.shape)}"
            )
        # An input returned as it is would be handed through, not written: behind a barrier it stays in its place.
        # The conversion changes no value: it takes the weak type away, with which the next step would compile anew.
        held = jax.lax.optimization_barrier(array) if id(leaf) in inputs else array
        renewed.append(jax.lax.convert_element_type(held, old.dtype))
    return renewed


def _check_apart(name: str, array: Any, buffers: list[Buffer]) -> None:
    """Check that an array lies in none of the buffers, each of which one side may write while the other reads."""
    if not array.size or len(array.devices()) != 1:
        return
    start = array.unsafe_buffer_pointer()
    end = start + array.nbytes
    for buffer in buffers:
        for tensor in buffer.tensors:
            if start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end:
                raise ValueError(
                    f"{name} must not share memory with buffers[{buffer.name!r}]: use the buffer itself inside the "
                    "step, or a clone()"
                )


def _name(path: Any) -> str:
    """Return the name of an argument from its place in ``(args, kwargs)``."""
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def _names(buffers: list[Buffer]) -> list[str]:
    return [buffer.name for buffer in buffers]


def _is_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
