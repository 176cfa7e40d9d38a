"""Calls that look like one before: launched again directly, without checks that could not come out otherwise.

An eager call of a serving loop differs from the last one in addresses alone. What shapes, strides, dtypes and options
decide was checked and compiled at the first such call; here its kernels are launched with this call's addresses, past
operator dispatch and Triton's own lookup. Whatever could make a difference leaves this path: modes and transformations
that want to see an operator, gradients, another current device, an output that may overlap an input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from swa_torch._call import DecodeCall
    from swa_torch._triton._launch import Launch

REMEMBERED_CALLS = 4096
_ALIGNMENT = 15
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

TENSORS = (
    "query", "key_cache", "value_cache", "block_table", "seq_lens", "gate", "cu_query_lens", "kv_start", "kv_end",
    "sinks", "k_scale", "v_scale", "output", "workspace",
)  # fmt: skip
"""The order in which a call's tensors come here."""

_OUTPUT, _WORKSPACE = TENSORS.index("output"), TENSORS.index("workspace")
_ALIGNED = (*(TENSORS.index(name) for name in ("query", "key_cache", "value_cache")), _OUTPUT)
_SOURCES = {
    "Query": "query", "KeyCache": "key_cache", "ValueCache": "value_cache", "BlockTable": "block_table",
    "SeqLens": "seq_lens", "CuQueryLens": "cu_query_lens", "KvStart": "kv_start", "KvEnd": "kv_end",
    "KScale": "k_scale", "VScale": "v_scale", "Sinks": "sinks", "Gate": "gate", "Output": "output",
}  # fmt: skip
_PARTIALS, _LSE = ("Partial", "PartialLse"), "Lse"

Key = tuple[Any, ...]


class Kernel(NamedTuple):
    """A compiled kernel: how to run it, its arguments in order, and which of them are addresses of this call.

    ``compiled`` is kept because Triton unloads a kernel that nobody refers to.
    """

    run: Callable[..., None]
    compiled: Any
    arguments: list[Any]
    addresses: list[tuple[int, int]]
    partials: list[tuple[int, int]]
    lse: int | None


class Again(NamedTuple):
    """What a remembered call needs to run: kernels, what to allocate, and what was true of its addresses."""

    kernels: list[Kernel]
    device: torch.device
    misaligned: tuple[int, ...]
    reaches: tuple[int, ...]
    output: tuple[tuple[int, ...], torch.dtype]
    lse: tuple[int, ...] | None
    workspace_bytes: int


_remembered: dict[Key, Again] = {}


def key_of(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Key | None:
    """Return what two calls have in common that run alike, or None for a call that must take the long way.

    ``tensors`` in the order of ``TENSORS``; ``options`` are everything else, and the types of those options that
    compare equal to others which are refused (``True == 1 == 1.0``).
    """
    if not _is_candidate(tensors[0]) or is_observed():
        return None
    try:
        looks = tuple([
            None
            if tensor is None
            else (
                type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
                tensor.is_neg(),
            )
            for tensor in tensors
        ])  # fmt: skip
    except (AttributeError, RuntimeError):  # something that is no tensor, or no tensor with memory
        return None
    return looks, options, torch.is_grad_enabled()


def _is_candidate(query: object) -> bool:
    return type(query) is torch.Tensor and query.is_cuda


def run_again(key: Key, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, Any] | None:
    """Run a call like one before; return ``(output, lse or None)``, or None where it must take the long way."""
    try:
        again = _remembered.get(key)
    except TypeError:  # an option that cannot be hashed, which the long way refuses
        return None
    if again is None:
        return None
    index = again.device.index
    if torch.cuda.current_device() != index or _hooked():
        return None
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    output = tensors[_OUTPUT]
    query = tensors[0]
    if output is None:
        # Of its own dtype, and with sizes one by one: half the cost of any other way to allocate.
        shape, dtype = again.output
        output = query.new_empty(*shape) if dtype == query.dtype else query.new_empty(shape, dtype=dtype)
        addresses[_OUTPUT] = output.data_ptr()
    elif _may_overlap(_OUTPUT, addresses, again.reaches):
        return None
    if tuple([addresses[i] & _ALIGNMENT for i in _ALIGNED]) != again.misaligned:
        return None
    workspace = addresses[_WORKSPACE]
    if again.workspace_bytes and not workspace:
        scratch = query.new_empty(-(-again.workspace_bytes // query.itemsize))
        workspace = scratch.data_ptr()
    elif workspace and (workspace % 256 or _may_overlap(_WORKSPACE, addresses, again.reaches)):
        return None
    lse = None if again.lse is None else query.new_empty(again.lse, dtype=torch.float32)
    stream = _stream_getter()(index)
    for kernel in again.kernels:
        arguments = kernel.arguments.copy()
        for position, source in kernel.addresses:
            arguments[position] = addresses[source]
        for position, offset in kernel.partials:
            arguments[position] = workspace + offset
        if kernel.lse is not None and lse is not None:
            arguments[kernel.lse] = lse.data_ptr()
        kernel.run(stream, arguments)
    return output, lse


def remember(key: Key, tensors: tuple[Any, ...], call: DecodeCall) -> None:
    """Remember a call that has just run the long way, so that its kernels are compiled.

    ``key`` is what ``key_of`` returned, ``tensors`` are the call's in the order of ``TENSORS``.
    """
    if call.plan.kernel != "portable" or not call.query.shape[0] or not call.block_table.shape[0]:
        return
    if any(tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg()) for tensor in tensors):
        return  # a subclass wants to see an operator, and a tensor that is yet to be negated needs one
    try:
        again = _again(tensors, call)
    except Exception:  # the call itself has succeeded: what cannot be repeated goes the long way again
        return
    while len(_remembered) >= REMEMBERED_CALLS:
        _remembered.pop(next(iter(_remembered)), None)  # the oldest
    _remembered[key] = again


def _again(tensors: tuple[Any, ...], call: DecodeCall) -> Again:
    from swa_torch._triton import _launch

    kernels = []
    partials_at, workspace_bytes = call.plan.workspace_layout(call.query.shape[0])
    with _launch.device_guard(call.output.device):
        for launch in _launch.launches(call):
            compiled = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
            kernels.append(_kernel(launch, compiled, partials_at))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    addresses[_OUTPUT] = call.output.data_ptr()
    return Again(
        kernels,
        call.output.device,
        tuple([addresses[i] & _ALIGNMENT for i in _ALIGNED]),
        tuple([0 if tensor is None else _reach(tensor) for tensor in tensors]),
        (tuple(call.output.shape), call.output.dtype),
        None if call.lse is None else tuple(call.lse.shape),
        workspace_bytes,
    )


def _kernel(launch: Launch, compiled: Any, partials_at: int) -> Kernel:
    names = launch.kernel.arg_names
    arguments = [launch.arguments[name] for name in names]
    addresses, partials, lse = [], [], None
    for position, name in enumerate(names):
        if not isinstance(arguments[position], torch.Tensor):
            continue
        arguments[position] = 0  # filled in at each call; nothing is kept alive
        if name in _SOURCES:
            addresses.append((position, TENSORS.index(_SOURCES[name])))
        elif name in _PARTIALS:
            partials.append((position, partials_at if name == _PARTIALS[1] else 0))
        elif name == _LSE:
            lse = position
        else:
            raise ValueError(f"{name} must be one of a call's tensors")
    return Kernel(_launcher(compiled, launch.grid), compiled, arguments, addresses, partials, lse)


_LAUNCHER_PARAMETERS = ["gridX", "gridY", "gridZ", "stream", "function"]


def _launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Return ``run(stream, arguments)`` of a compiled kernel.

    Triton's launcher is called without the metadata and the hooks of its profiler, which cost as much as the launch
    (``_hooked`` sends calls that a profiler watches the long way). A Triton whose launcher takes other arguments is
    asked as its documentation has it.
    """
    launcher = getattr(compiled, "run", None)
    if launcher is not None and _parameters(launcher)[:5] == _LAUNCHER_PARAMETERS:
        first = (compiled.function, compiled.packed_metadata, None, None, None)
        return lambda stream, arguments: launcher(*grid, stream, *first, *arguments)
    runner = compiled[grid]
    return lambda stream, arguments: runner(*arguments, stream=stream)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _may_overlap(written: int, addresses: list[int], reaches: tuple[int, ...]) -> bool:
    """Whether the bytes between the ends of a tensor that is written touch those of another."""
    start = addresses[written]
    stop = start + reaches[written]
    return any(address < stop and start < address + reaches[i] and i != written for i, address in enumerate(addresses))


def _probe() -> Callable[[], bool]:
    """Return a function that says whether a mode, a transformation or a profiler wants to see every call.

    Its parts are torch's and Triton's own, and may move: without them every call takes the long way.
    """
    try:
        modes = torch._C._len_torch_dispatch_stack
        functions = torch._C._len_torch_function_stack
        interpreter = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
        tracing = torch._C._get_tracing_state
        profiled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
        if not (isinstance(modes(), int) and isinstance(functions(), int) and isinstance(profiled(), bool)):
            return lambda: True
    except (AttributeError, TypeError):
        return lambda: True
    return lambda: bool(modes() or functions() or interpreter() is not None or tracing() is not None or profiled())


is_observed = _probe()


@functools.cache
def _stream_getter() -> Callable[[int], int]:
    """Return Triton's own way to torch's current stream, which costs a tenth of a ``torch.cuda.Stream``."""
    from triton.runtime import driver

    return driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]


def _hooked() -> bool:
    """Whether a profiler of Triton's own (Proton) watches launches."""
    runtime = _runtime_knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(enter is not None and getattr(enter, "calls", True)) or bool(
        leave is not None and getattr(leave, "calls", True)
    )


@functools.cache
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime
