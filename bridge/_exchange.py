"""``to_jax`` and ``to_torch``: the same memory in the other framework, or an error that says why not.

What travels is the compact base, because an imported view with strides is copied by XLA before a kernel runs. An import
orders JAX programs *that use it* after the work that torch's current stream holds so far; an export orders torch's
current stream after what JAX has dispatched for the array. Nothing orders later writes: see ``Session``.
"""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
import torch
from jax import dlpack
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from torch._subclasses.fake_tensor import FakeTensor

import swa_pallas
import swa_torch
from bridge._caches import with_bases
from bridge._devices import (
    LEGACY_DEFAULT_STREAM,
    alignment_of,
    check_client,
    check_not_capturing,
    check_torch_device,
    jax_device_of,
    on_device,
)
from bridge._dtypes import check_dtype
from bridge._versions import check_versions

with jax.ensure_compile_time_eval():
    _OUTSIDE_TRACES = get_opaque_trace_state()


@overload
def to_jax(x: torch.Tensor, *, copy: bool = False) -> jax.Array: ...
@overload
def to_jax(x: swa_torch.PagedCache, *, copy: bool = False) -> swa_pallas.PagedCache: ...
def to_jax(x: torch.Tensor | swa_torch.PagedCache, *, copy: bool = False) -> jax.Array | swa_pallas.PagedCache:
    """Return a JAX array (or cache) on the memory of a tensor (or cache).

    JAX programs that use the result run after what torch's current stream holds now. torch may still write to the
    memory: programs dispatched later with the same array see the new values, or old ones, because nothing orders them.
    Import again for every step, or use a ``Session``. On the CPU torch has finished when it returns.

    Args:
        x: a plain contiguous tensor at a multiple of 16 bytes (CPU: 64) of bf16, fp16, fp32, fp8 e4m3fn, fp8 e5m2,
            int8, uint8, int32, or int64 under ``jax_enable_x64``; or a ``swa_torch.PagedCache`` of such bases.
        copy: copy on the device instead of sharing; takes strided, misaligned and pinned tensors and those that require
            grad.

    Raises:
        TypeError: no tensor, a subclass, or a dtype that does not cross.
        ValueError: it cannot be shared without a copy, or not with this device.
        RuntimeError: inside a JAX transformation, or torch's current stream is under capture.
        NotImplementedError: HIP, JAX's TFRT client, or versions older than are supported.
    """
    check_versions()
    check_outside_traces("to_jax")
    return import_value("x", x, copy=copy)


@overload
def to_torch(x: jax.Array, *, copy: bool = False) -> torch.Tensor: ...
@overload
def to_torch(x: swa_pallas.PagedCache, *, copy: bool = False) -> swa_torch.PagedCache: ...
def to_torch(x: jax.Array | swa_pallas.PagedCache, *, copy: bool = False) -> torch.Tensor | swa_torch.PagedCache:
    """Return a tensor (or cache) on the memory of a JAX array (or cache).

    torch's current stream waits for the programs that compute the array; on the CPU this call does. JAX believes its
    arrays immutable: writing to the tensor changes what JAX reads, and orders nothing (a ``Session`` does). While the
    tensor lives, JAX refuses to donate the array (on the CPU it copies instead). Once array and tensor are dropped, JAX
    may reuse the memory, also of a copy, although torch's stream still holds reads of it: wait for them first.

    Args:
        x: an array on one CPU or CUDA device, dtypes as in ``to_jax``; or a ``swa_pallas.PagedCache`` of such bases.
        copy: copy on the device instead of sharing.

    Raises:
        TypeError: no concrete array, or a dtype that does not cross.
        ValueError: deleted or donated, sharded over several devices, or in another kind of memory.
        RuntimeError: inside a JAX transformation, or torch's current stream is under capture.
        NotImplementedError: JAX's TFRT client, or versions older than are supported.
    """
    check_versions()
    if not isinstance(x, Tracer):  # whose error says more
        check_outside_traces("to_torch")
    return export_value("x", x, copy=copy)


def import_value(name: str, x: Any, *, copy: bool = False) -> Any:
    """Return what ``to_jax`` does, with a name for messages."""
    if not isinstance(x, swa_torch.PagedCache):
        return _import(name, x, copy)
    return with_bases(swa_pallas.PagedCache, x, [_import(part, base, copy) for part, base in _named_bases(name, x)])


def export_value(name: str, x: Any, *, copy: bool = False) -> Any:
    """Return what ``to_torch`` does, with a name for messages."""
    if not isinstance(x, swa_pallas.PagedCache):
        return _export(name, x, copy)
    return with_bases(swa_torch.PagedCache, x, [_export(part, base, copy) for part, base in _named_bases(name, x)])


def check_tensor(name: str, tensor: Any) -> None:
    """Check that a tensor can be shared as it is.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``to_jax``.
    """
    _check_kind(name, tensor)
    _check_memory(name, tensor)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Check what a copy would mend."""
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require grad, which JAX would lose: pass {name}.detach()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, because JAX copies a strided array before it runs a kernel: pass the compact "
            f"base (for a cache PagedCache(base, layout), which views it on either side), or copy=True, got shape "
            f"{tuple(tensor.shape)} and strides {tuple(tensor.stride())}"
        )
    if tensor.device.type == "cpu" and tensor.is_pinned():
        raise ValueError(
            f"{name} must be in ordinary CPU memory or on a GPU, got pinned host memory: pass {name}.clone() or "
            "copy=True"
        )
    alignment = alignment_of(tensor.device)
    if tensor.numel() and tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name} must start at a multiple of {alignment} bytes on the {tensor.device.type}, got one at byte "
            f"{tensor.storage_offset() * tensor.element_size()} of its storage, address {tensor.data_ptr():#x}: pass "
            f"{name}.clone() or copy=True"
        )


def check_array(name: str, array: Any) -> torch.device:
    """Check that an array can be shared, and return torch's name of its device.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``to_torch``.
    """
    if isinstance(array, Tracer):
        raise TypeError(f"{name} must be a concrete array, got {array}: exchange outside jax.jit, not inside")
    if not isinstance(array, jax.Array):
        raise TypeError(f"{name} must be a jax.Array or a swa_pallas.PagedCache, got {type(array).__name__}")
    if array.is_deleted():
        raise ValueError(f"{name} must not have been donated or deleted: use the result of the function that took it")
    check_dtype(name, array.dtype.name)
    devices = array.sharding.device_set
    if len(devices) > 1:
        raise ValueError(
            f"{name} must be on one device, got {len(devices)}: exchange its shards, "
            f"[to_torch(shard.data) for shard in {name}.addressable_shards]"
        )
    (device,) = devices
    kind = array.sharding.memory_kind
    if device.platform == "cpu":
        return torch.device("cpu")
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        raise ValueError(f"{name} must be on the CPU or a CUDA device, got {device}")
    if kind not in (None, "device"):
        raise ValueError(
            f"{name} must be in device memory, got {kind!r}: "
            f"jax.device_put({name}, {name}.sharding.with_memory_kind('device'))"
        )
    check_client(device)
    if not torch.cuda.is_available():
        raise ValueError(f"{name} must be on a device that torch sees too, got {device} and a torch without CUDA")
    return torch.device("cuda", device.local_hardware_id)


def _import(name: str, tensor: Any, copy: bool) -> jax.Array:
    _check_kind(name, tensor)
    with on_device(tensor.device):
        check_not_capturing(tensor.device)
        if copy:
            # A fresh tensor is compact and aligned; a pinned one's clone is not pinned.
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        _check_memory(name, tensor)
        jax_device_of(name, tensor.device)
        return share(name, tensor)


def share(name: str, tensor: torch.Tensor) -> jax.Array:
    """Return an array on the memory of a tensor that was checked, on torch's current device.

    Raises:
        TypeError: the dtype does not cross (any more).
        RuntimeError: JAX copied.
    """
    check_dtype(name, str(tensor.dtype).removeprefix("torch."))
    # An alias: the capsule holds a tensor, not its memory, and the caller's may be given other memory (`.data = ...`).
    array = dlpack.from_dlpack(tensor.detach(), copy=False)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise RuntimeError(f"{name} was copied by JAX although it must not be (jax {jax.__version__})")
    return array


def check_outside_traces(name: str) -> None:
    """Check that JAX is not tracing: what crosses while it does would be a constant of the program.

    Raises:
        RuntimeError: it is.
    """
    if get_opaque_trace_state() != _OUTSIDE_TRACES:
        raise RuntimeError(
            f"{name} must be called outside jax.jit and other transformations, between jitted functions: inside, it "
            "would run once, while JAX traces, and what it returns would be a constant"
        )


def _export(name: str, array: Any, copy: bool) -> torch.Tensor:
    device = check_array(name, array)
    with on_device(device):
        check_not_capturing(device)
        if copy:
            array = jnp.copy(array)
        if device.type == "cpu":
            jax.block_until_ready(array)
            return torch.from_dlpack(array)
        stream = torch.cuda.current_stream(device).cuda_stream
        return torch.from_dlpack(array.__dlpack__(stream=stream or LEGACY_DEFAULT_STREAM))


def _check_kind(name: str, tensor: Any) -> None:
    """Check type, dtype and device: what no copy mends."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        hint = ""
        if isinstance(tensor, FakeTensor):
            hint = " (it has no memory)"
        elif isinstance(tensor, torch.Tensor):
            hint = " (a subclass may mean more than its memory; if not, pass tensor.as_subclass(torch.Tensor))"
        elif isinstance(tensor, jax.Array):
            hint = " (it is JAX's already)"
        raise TypeError(f"{name} must be a torch.Tensor or a swa_torch.PagedCache, got {type(tensor).__name__}{hint}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must hold its own values, got a lazy conjugate or negative: pass {name}.clone()")
    check_dtype(name, str(tensor.dtype).removeprefix("torch."))
    check_torch_device(name, tensor.device)


def _named_bases(name: str, cache: Any) -> list[tuple[str, Any]]:
    """Return a cache's bases, each with its name."""
    names = [f"{name}.bases[{number}]" for number in range(2)] if len(cache.bases) == 2 else [f"the base of {name}"]
    return list(zip(names, cache.bases, strict=True))
