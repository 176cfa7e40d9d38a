"""Rivals, loaded from ``.bench`` (see ``fetch_peers``) with the few vLLM imports that they make stubbed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.fetch_peers import FILES, FOLDER


def original_kernel() -> Callable[..., Any] | None:
    """Return the original ``swa_decode_gated``, with programmatic dependent launch as on its own platform, or None."""
    if not all((FOLDER / name).exists() for name in FILES):
        return None
    platform = types.SimpleNamespace(is_arch_support_pdl=lambda: torch.cuda.get_device_capability()[0] >= 9)
    stubs = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "bench_peer": {"__path__": [str(FOLDER)]},
    }
    for name, members in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    for stem in ("sparse_decode_attention", "swa_decode"):
        spec = importlib.util.spec_from_file_location(f"bench_peer.{stem}", FOLDER / f"{stem}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["bench_peer.swa_decode"].swa_decode_gated
