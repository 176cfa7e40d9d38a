"""Rivals' functions, loaded from ``.bench`` (see ``fetch_peers``).

Triton sources are imported with the few vLLM modules that they import stubbed; FlashAttention 3 is a library of torch
operators. None of them is changed.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import lzma
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.fetch_peers import COMMAND, FA3_FILES, FA3_LIBRARY, FOLDER, ORIGINAL_FILES, UNIFIED_FILES, present

_PACKAGE = "bench_peers"


def absent(names: tuple[str, ...]) -> str | None:
    """Return why a peer cannot be loaded, with the command that fetches it, or None."""
    return None if present(names) else f"not fetched: {COMMAND}"


@functools.cache
def original_kernel() -> Callable[..., Any] | None:
    """Return the original ``swa_decode_gated``, with dependent launch as on its own platform, or None if absent."""
    if absent(ORIGINAL_FILES):
        return None
    with _stubbed_vllm():
        _, module = map(_load, ORIGINAL_FILES)  # the second imports from the first
    return module.swa_decode_gated


@functools.cache
def unified_attention() -> Callable[..., Any] | None:
    """Return vLLM's general Triton kernel, or None if absent."""
    if absent(UNIFIED_FILES):
        return None
    with _stubbed_vllm():
        sys.modules["vllm.v1.attention.ops.triton_attention_helpers"] = _load(UNIFIED_FILES[0])
        return _load(UNIFIED_FILES[1]).unified_attention


@functools.cache
def flash_attention_3() -> Any:
    """Return FlashAttention 3's operators (``fwd``, ``get_scheduler_metadata``); call only where it is not absent.

    The library is unpacked into the temporary folder of this machine, once: ``.bench`` stays small.

    Raises:
        OSError: torch cannot load it: another version of torch, or no CUDA.
    """
    packed = FOLDER / FA3_FILES[0]
    folder = Path(tempfile.gettempdir()) / f"{_PACKAGE}-{os.getuid()}"
    library = folder / f"{packed.stat().st_size}-{FA3_LIBRARY}"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        partial.write_bytes(lzma.decompress(packed.read_bytes()))
        partial.rename(library)
    torch.ops.load_library(str(library))
    return torch.ops._vllm_fa3_C


@contextmanager
def _stubbed_vllm() -> Iterator[None]:
    """Put the vLLM modules in place that the sources import, and take them away again."""
    import triton
    import triton.language as tl

    def capability() -> int:
        return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0

    platform = types.SimpleNamespace(
        is_arch_support_pdl=lambda: capability() >= 9,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: capability() == family // 10,
    )
    logger = types.SimpleNamespace(debug_once=lambda *words: None)
    modes = {"NONE": 0, "INT8_PER_TOKEN_HEAD": 2, "FP8_PER_TOKEN_HEAD": 3, "INT4_PER_TOKEN_HEAD": 4}
    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": enum.IntEnum("KVQuantMode", modes)},
    }
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    try:
        for name, members in stubs.items():
            sys.modules[name] = _module(name, members)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update({"__path__": [], **members})
    return module


def _load(file: str) -> Any:
    """Import a file of ``.bench`` as a module of a package of its own; the package makes relative imports work."""
    sys.modules.setdefault(_PACKAGE, _module(_PACKAGE, {"__path__": [str(FOLDER)]}))
    name = f"{_PACKAGE}.{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
