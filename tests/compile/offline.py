"""Compiles what a launch would compile, for any architecture and without a GPU.

The launch code itself runs, on small CPU tensors, with recorders in place of the kernels: arguments and options are
then exactly those of a real launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swa_plan import DeviceProfile, Plan
from swa_torch import PagedCache
from swa_torch._call import DecodeCall
from swa_torch._triton import _launch

# A100, H100 and H200, B200, RTX 50: one chip of each family that the kernels are for.
PROFILES = {80: "a100", 90: "h200", 100: "b200", 120: "rtx5090"}

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Usage(NamedTuple):
    """What one compiled kernel takes."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((args, options))

    def compile(self, capability: int) -> Usage:
        """Compile the only launch for an architecture; return what it takes."""
        compiled = self.build(capability)
        return Usage(*cubin_resources(compiled.asm["cubin"]), compiled.metadata.shared)

    def build(self, capability: int) -> Any:
        """Return the only launch compiled for an architecture."""
        ((args, options),) = self.launches
        fn = self.kernel
        values = dict(zip(fn.arg_names, args, strict=False))
        values.update({name: options.pop(name) for name in list(options) if name in fn.arg_names})
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(fn.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(index,)] = "constexpr", value
            elif hasattr(value, "block_shape"):
                box = ",".join(map(str, value.block_shape))
                signature[parameter.name] = f"tensordesc<{_POINTERS[value.base.dtype][1:]}[{box}],{value.layout!r}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = _POINTERS[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        source = source_kind(fn)(fn, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def record_decode(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, capability: int, **options: Any
) -> tuple[Recorder, Recorder]:
    """Return recorders of the split and the combine kernel after one call; ``options`` are its optional tensors."""
    split, combine = Recorder(_launch.swa_decode_split), Recorder(_launch.swa_decode_combine)
    monkeypatch.setattr(_launch, "swa_decode_split", split)
    monkeypatch.setattr(_launch, "swa_decode_combine", combine)
    monkeypatch.setattr(_launch, "device_profile", lambda device: DeviceProfile.named(PROFILES[capability]))
    _launch.decode(small_call(plan, **options))
    return split, combine


def record_hopper(monkeypatch: pytest.MonkeyPatch, plan: Plan, **options: Any) -> tuple[Recorder, Recorder]:
    """Return recorders of the Hopper split kernel and the combine kernel after one call."""
    from swa_torch._gluon import _launch as hopper

    split, combine = Recorder(hopper.swa_decode_split_hopper), Recorder(_launch.swa_decode_combine)
    monkeypatch.setattr(hopper, "swa_decode_split_hopper", split)
    monkeypatch.setattr(_launch, "swa_decode_combine", combine)
    monkeypatch.setattr(_launch, "device_profile", lambda device: DeviceProfile.named("h200"))
    hopper.decode(small_call(plan, **options))
    return split, combine


def source_kind(kernel: Any) -> type[ASTSource]:
    """Return what the compiler is handed: Gluon's functions are of a language of their own."""
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def small_call(plan: Plan, **options: Any) -> DecodeCall:
    """Return a call of one request that ``plan`` serves."""
    problem = plan.problem
    dtype, cache_dtype = getattr(torch, problem.dtype), getattr(torch, problem.cache_dtype or problem.dtype)
    cache = PagedCache.empty(
        "pages block kv_heads (kv dim)", pages=2, block=problem.block, kv_heads=problem.kv_heads, k_dim=problem.k_dim,
        v_dim=problem.v_dim, dtype=cache_dtype,
    )  # fmt: skip
    tensors = dict.fromkeys(("gate", "cu_query_lens", "kv_start", "kv_end", "sinks", "k_scale", "v_scale", "lse"))
    rows = problem.query_len
    numbers = {"scale": 1.0, "k_scale_number": 1.0, "v_scale_number": 1.0, "softcap": None}
    return DecodeCall(
        query=torch.zeros(rows, problem.heads, problem.k_dim, dtype=dtype), key_cache=cache.key_cache,
        value_cache=cache.value_cache, block_table=torch.zeros(1, problem.max_blocks, dtype=torch.int32),
        seq_lens=torch.zeros(1, dtype=torch.int32), output=torch.zeros(rows, problem.heads, problem.v_dim, dtype=dtype),
        workspace=None, plan=plan, **{**tensors, **numbers, **options},
    )  # fmt: skip


def cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes, as the assembler reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", report).group(1)) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local
