"""One paged cache in two frameworks: PyTorch owns it and appends, PyTorch and JAX decode from it, step by step.

    python examples/two_frameworks.py

Runs on a GPU if both frameworks see one, else on the CPU. Nothing is copied; only what is printed is waited for.
"""

import os

# JAX would otherwise take three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

import swa_pallas
import swa_torch
from bridge import Session

device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
requests, heads, kv_heads, dim, block, window = 3, 8, 2, 64, 16, 48

cache = swa_torch.PagedCache(
    torch.randn(64, 2, block, kv_heads, dim, device=device).bfloat16(), "pages kv block kv_heads dim"
)
block_table = torch.randperm(64, device=device).to(torch.int32)[: requests * 16].view(requests, 16)
seq_lens = torch.tensor([100, 37, 1], dtype=torch.int32, device=device)
query = torch.randn(requests, heads, dim, device=device).bfloat16()

with Session({"cache": cache, "query": query, "block_table": block_table, "seq_lens": seq_lens}) as session:
    decode_in_jax = session.jax_step(
        lambda buffers: swa_pallas.swa_decode(
            buffers["query"], buffers["cache"], buffers["block_table"], buffers["seq_lens"], window=window
        )
    )
    for step in range(8):
        # torch writes: a new query, and the newest token's key and value at slot = page * block + offset.
        query.normal_()
        page = block_table.gather(1, (seq_lens - 1).long()[:, None] // block)[:, 0]
        key, value = torch.randn(2, requests, kv_heads, dim, device=device).bfloat16()
        swa_torch.append(cache, key, value, page * block + (seq_lens - 1) % block)
        # Both decode the same bytes; JAX's step sees what torch wrote, and torch's next writes wait for it.
        theirs = decode_in_jax()
        ours = swa_torch.swa_decode(query, cache, block_table, seq_lens, window=window)
        print(step, tuple(theirs.shape), "largest difference", (ours.float() - theirs.float()).abs().max().item())
        seq_lens += 1
    for ours, theirs in session.pointers["cache"]:
        print(f"the cache: {ours:#x} in PyTorch, {theirs:#x} in JAX")
