"""Compiles what a Pallas kernel lowers to, for any architecture and without a GPU.

A call lowered for CUDA carries each kernel's Triton IR, which Triton's own pipeline turns into machine code here. XLA
runs the same passes of the Triton that it was built with, so registers may differ a little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import triton
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir as jax_ir
from jaxlib.triton import dialect
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from tests.compile.offline import Usage, cubin_resources

CUSTOM_CALL = "__gpu$xla.gpu.triton"


class Kernel(NamedTuple):
    """One kernel of a lowered call."""

    name: str
    text: str
    warps: int
    stages: int


def kernels(lowered: Any) -> list[Kernel]:
    """Return the Triton kernels of a call that was lowered for CUDA (a ``jax.stages.Lowered``)."""
    found: list[Kernel] = []

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    attributes = child.operation.attributes
                    target = attributes["call_target_name"] if "call_target_name" in attributes else None  # noqa: SIM401  (no dict)
                    if target is not None and target.value == CUSTOM_CALL:
                        found.append(_kernel(attributes["mhlo.backend_config"]))
                    visit(child.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


def _kernel(config: Any) -> Kernel:
    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)
        text = jax_ir.Module.parse(config["ir"].value_bytes).operation.get_asm()
    return Kernel(config["name"].value, text, config["num_warps"].value, config["num_stages"].value)


def compile_kernel(kernel: Kernel, capability: int, folder: Path) -> Usage:
    """Return what a kernel takes on an architecture."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    settings = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    source = folder / f"{kernel.name}.ttir"
    source.write_text(kernel.text)
    # Compilation from a file starts behind the passes on Triton IR, so they run here.
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(source), context)
    module.context = context
    module = backend.make_ttir(module, {}, backend.parse_options(settings), capability)
    source.write_text(str(module))
    compiled = triton.compile(str(source), target=target, options=settings)
    return Usage(*cubin_resources(compiled.asm["cubin"]), compiled.metadata.shared)
