"""Scratch memory that shows what a kernel leaves unwritten."""

from __future__ import annotations

import torch


def aligned_workspace(size: int, device: torch.device) -> torch.Tensor:
    """Return at least ``size`` bytes of workspace that hold NaN, aligned to 256 bytes."""
    floats = torch.full((size // 4 + 65,), float("nan"), device=device)
    return floats.view(torch.uint8)[-floats.data_ptr() % 256 :]
