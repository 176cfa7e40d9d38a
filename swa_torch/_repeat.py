"""Calls that look like one before: launched again directly, without checks that could not come out otherwise.

An eager call of a serving loop differs from the last one in addresses alone. What shapes, strides, dtypes and options
decide was checked and compiled at the first such call; here its kernels are launched with this call's addresses, past
operator dispatch and Triton's own lookup. Whatever could make a difference leaves this path: modes and transformations
that want to see an operator, gradients, another current device, an output that may overlap an input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from swa_torch._launcher import Addresses, Run, device_getter, is_hooked, make_run, stream_getter

if TYPE_CHECKING:
    from swa_torch._call import DecodeCall
    from swa_torch._triton._launch import Launch

REMEMBERED_CALLS = 4096
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PARTS_OF_COMPLEX = frozenset(
    value.to_real() for value in [*vars(torch).values()] if isinstance(value, torch.dtype) and value.is_complex
)
"""What ``conj().imag`` can be: no public function of torch leaves a tensor of another dtype to be negated later, and
asking costs as much as a stride."""

TENSORS = (
    "query", "key_cache", "value_cache", "block_table", "seq_lens", "gate", "cu_query_lens", "kv_start", "kv_end",
    "sinks", "k_scale", "v_scale", "output", "workspace",
)  # fmt: skip
"""The order in which a call's tensors come here."""

_OUTPUT, _WORKSPACE = TENSORS.index("output"), TENSORS.index("workspace")
_ARGUMENTS = (
    "Query", "KeyCache", "ValueCache", "BlockTable", "SeqLens", "Gate", "CuQueryLens", "KvStart", "KvEnd", "Sinks",
    "KScale", "VScale", "Output", "Partial", "PartialLse", "Lse",
)  # fmt: skip
"""What has an address, as kernels name it: ``TENSORS`` (the workspace begins with the partials), what else lies in the
workspace, and the LSE."""

Looks = list[Any]
"""Type, shape, strides, dtype and device of each of ``TENSORS``, or None."""
Options = tuple[Any, ...]
Key = tuple[Looks, Options]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a kernel is launched; ``compiled`` is kept because Triton unloads a kernel that nobody refers to."""

    run: Run
    compiled: Any


@dataclass(frozen=True, slots=True)
class Again:
    """What a remembered call needs to run: kernels, what to allocate, and what was true of its addresses.

    Addresses are in this order: the tensors given, in the order of ``TENSORS``; an output and a workspace where they
    are made here; the LSEs of splits; the LSE that is returned; None.

    Attributes:
        kernels: in order.
        device: index of the GPU.
        current_device: returns the index of the current GPU.
        stream_of: returns the current stream of a GPU.
        floating: places in ``TENSORS`` of what can require gradients.
        real: places in ``TENSORS`` of what can wait to be negated.
        present: picks the tensors that are given.
        output: place of the output's address.
        workspace: place of the workspace's address, or None without one.
        misaligned: see ``_misaligned``.
        reaches: by place of an address, bytes from a tensor's first element to the end of its last.
        shape: of the output.
        dtype: of the output where it is not the query's.
        lse_shape: of the LSE, if it is returned.
        scratch: elements of the query's dtype that make a workspace; 0 where none is made.
        lse_offset: bytes from a workspace's start to its LSEs.
    """

    kernels: tuple[Kernel, ...]
    device: int | None
    current_device: Callable[[], int]
    stream_of: Callable[[int | None], int]
    floating: tuple[int, ...]
    real: tuple[int, ...]
    present: itemgetter
    output: int
    workspace: int | None
    misaligned: tuple[int, ...]
    reaches: dict[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    lse_shape: tuple[int, ...] | None
    scratch: int
    lse_offset: int


@dataclass(slots=True)
class Alike:
    """The remembered calls of equal options; ``latest`` is compared first, as hashing looks costs as much again."""

    calls: dict[tuple[Any, ...], Again]
    latest: tuple[Looks, Again]


_remembered: dict[Options, Alike] = {}
_lock = threading.Lock()
"""Held while something is remembered or forgotten."""


def key_of(tensors: tuple[Any, ...], options: Options) -> Key | None:
    """Return what two calls have in common that run alike, or None for a call that must take the long way.

    ``tensors`` in the order of ``TENSORS``; ``options`` are everything else, and the types of those options that
    compare equal to others which are refused (``True == 1 == 1.0``).
    """
    if not _is_candidate(tensors[0]) or is_observed():
        return None
    try:
        looks = [
            None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            for tensor in tensors
        ]
    except (AttributeError, RuntimeError):  # something that is no tensor, or no tensor with memory
        return None
    return looks, options


def _is_candidate(query: object) -> bool:
    return type(query) is torch.Tensor and query.is_cuda


def run_again(key: Key, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, Any] | None:
    """Run a call like one before; return ``(output, lse or None)``, or None where it must take the long way."""
    again = _recall(key)
    if again is None or again.current_device() != again.device or is_hooked():
        return None
    if torch.is_grad_enabled():
        for place in again.floating:
            if tensors[place].requires_grad:
                return None
    for place in again.real:
        if tensors[place].is_neg():
            return None
    addresses: Addresses = [tensor.data_ptr() for tensor in again.present(tensors)]
    query, output = tensors[0], tensors[_OUTPUT]
    if output is None:
        # Of its own dtype, and with sizes one by one: half the cost of any other way to allocate.
        dtype = again.dtype
        output = query.new_empty(*again.shape) if dtype is None else query.new_empty(again.shape, dtype=dtype)
        addresses.append(output.data_ptr())
    elif _may_overlap(again.output, addresses, again.reaches):
        return None
    if _misaligned(addresses, again.output) != again.misaligned:
        return None
    if 0 in addresses and not _all_there(addresses, again.reaches):
        return None
    workspace = 0
    if again.scratch:
        scratch = query.new_empty(again.scratch)
        workspace = scratch.data_ptr()
        addresses.append(workspace)
    elif again.workspace is not None:
        workspace = addresses[again.workspace]
        if workspace % 256 or _may_overlap(again.workspace, addresses, again.reaches):
            return None
    lse = None if again.lse_shape is None else query.new_empty(again.lse_shape, dtype=torch.float32)
    addresses += (workspace + again.lse_offset, None if lse is None else lse.data_ptr(), None)
    stream = again.stream_of(again.device)
    for kernel in again.kernels:
        kernel.run(stream, addresses)
    return output, lse


def _recall(key: Key) -> Again | None:
    """Return what was remembered for a key."""
    looks, options = key
    try:
        alike = _remembered.get(options)
        if alike is None:
            return None
        remembered, again = alike.latest
        if remembered == looks:
            return again
        again = alike.calls.get(tuple(looks))
    except TypeError:  # an option that cannot be hashed, which the long way refuses
        return None
    if again is not None:
        alike.latest = looks, again
    return again


def remember(key: Key, tensors: tuple[Any, ...], call: DecodeCall) -> None:
    """Remember a call that has just run the long way, so that its kernels are compiled.

    ``key`` is what ``key_of`` returned, ``tensors`` are the call's in the order of ``TENSORS``.
    """
    if call.plan.kernel != "portable" or not call.query.shape[0] or not call.block_table.shape[0]:
        return
    if is_hooked():  # what was compiled may be for the profiler
        return
    if any(tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg()) for tensor in tensors):
        return  # a subclass wants to see an operator, and a tensor that is yet to be negated needs one
    try:
        again = _again(tensors, call)
    except Exception:  # the call itself has succeeded: what cannot be repeated goes the long way again
        return
    looks, options = key
    with _lock:
        while sum(len(alike.calls) for alike in _remembered.values()) >= REMEMBERED_CALLS:
            del _remembered[next(iter(_remembered))]  # the oldest options
        alike = _remembered.setdefault(options, Alike({}, (looks, again)))
        alike.calls[tuple(looks)] = again
        alike.latest = looks, again


def _again(tensors: tuple[Any, ...], call: DecodeCall) -> Again:
    from swa_torch._triton import _launch

    lse_offset, workspace_bytes = call.plan.workspace_layout(call.query.shape[0])
    scratch = 0 if call.workspace is not None else -(-workspace_bytes // call.query.itemsize)
    given = [place for place, tensor in enumerate(tensors) if tensor is not None]
    made = [place for place, is_made in ((_OUTPUT, tensors[_OUTPUT] is None), (_WORKSPACE, scratch > 0)) if is_made]
    order = [_ARGUMENTS[place] for place in (*given, *made)] + ["PartialLse", "Lse"]
    output = order.index("Output")
    used = [tensors[place] for place in given]
    if _OUTPUT in made:
        used.append(call.output)
    with _launch.device_guard(call.output.device):
        kernels = tuple([_kernel(launch, order) for launch in _launch.launches(call)])
    return Again(
        kernels=kernels,
        device=call.output.device.index,
        current_device=device_getter(),
        stream_of=stream_getter(),
        floating=tuple([place for place in given if tensors[place].is_floating_point()]),
        real=tuple([place for place in given if tensors[place].dtype in _PARTS_OF_COMPLEX]),
        present=itemgetter(*given),
        output=output,
        workspace=order.index("Partial") if "Partial" in order else None,
        misaligned=_misaligned([tensor.data_ptr() for tensor in used], output),
        reaches=dict(enumerate(map(_reach, used))),
        shape=tuple(call.output.shape),
        dtype=None if call.output.dtype == call.query.dtype else call.output.dtype,
        lse_shape=None if call.lse is None else tuple(call.lse.shape),
        scratch=scratch,
        lse_offset=lse_offset,
    )


def _kernel(launch: Launch, order: Sequence[str]) -> Kernel:
    """Return what launches a kernel again, its first arguments being addresses in ``order``, or None."""
    compiled = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
    names = launch.kernel.arg_names
    tensors = [name for name in names if name in _ARGUMENTS]
    numbers = [launch.arguments[name] for name in names[len(tensors) :]]
    if tensors != names[: len(tensors)] or any(isinstance(number, torch.Tensor) for number in numbers):
        raise ValueError(f"a kernel's first arguments must be tensors of a call, and no others, got {names}")
    places = [len(order) if launch.arguments[name] is None else order.index(name) for name in tensors]
    return Kernel(make_run(compiled, launch.grid, places, numbers), compiled)


def _misaligned(addresses: Addresses, output: int) -> tuple[int, ...]:
    """Return query, caches and output modulo 16: the addresses that Triton compiles for."""
    return addresses[0] % 16, addresses[1] % 16, addresses[2] % 16, addresses[output] % 16


def _all_there(addresses: Addresses, reaches: dict[int, int]) -> bool:
    """Whether no tensor that has elements is without memory, as one of zeros may be that was never filled."""
    return not any(addresses[place] == 0 and reach for place, reach in reaches.items())


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _may_overlap(written: int, addresses: Addresses, reaches: dict[int, int]) -> bool:
    """Whether the bytes between the ends of a tensor that is written touch those of another."""
    start = addresses[written]
    stop = start + reaches[written]
    for place, reach in reaches.items():
        address = addresses[place]
        if address < stop and start < address + reach and place != written:
            return True
    return False


def _probe() -> Callable[[], bool]:
    """Return a function that says whether a mode, a transformation or a profiler wants to see every call.

    Its parts are torch's and Triton's own, and may move: without them every call takes the long way.
    """
    try:
        modes = torch._C._len_torch_dispatch_stack
        functions = torch._C._len_torch_function_stack
        interpreter = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
        tracing = torch._C._is_tracing
        profiled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
        if not (isinstance(modes(), int) and isinstance(functions(), int) and isinstance(profiled(), bool)):
            return lambda: True
    except (AttributeError, TypeError):
        return lambda: True
    return lambda: bool(modes() or functions() or interpreter() is not None or tracing() or profiled())


is_observed = _probe()
