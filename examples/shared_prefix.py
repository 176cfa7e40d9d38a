"""Attention in parts: a prefix and the rest, merged, equal attention over everything.

    python examples/shared_prefix.py

``kv_start`` and ``kv_end`` cut what a request sees without moving its rows; ``merge_states`` adds sinks and gate once.
The same two calls serve cascades (a prefix that many requests share) and context that is sharded over devices.
"""

import torch

from swa_torch import PagedCache, merge_states, swa_decode

torch.manual_seed(0)
heads, kv_heads, dim, block = 8, 2, 64, 16
cache = PagedCache.empty(
    "pages kv_heads block (kv dim)", pages=40, block=block, kv_heads=kv_heads, k_dim=dim, dtype=torch.float32
)
cache.bases[0].normal_()
block_table = torch.randperm(40).to(torch.int32).view(2, 20)
seq_lens = torch.tensor([300, 170], dtype=torch.int32)
query, gate, sinks = torch.randn(2, heads, dim), torch.randn(2, heads), torch.randn(heads)

prefix = torch.full((2,), 128, dtype=torch.int32)
step = {"window": None, "return_lse": True, "out_dtype": torch.float32}
parts = [
    swa_decode(query, cache, block_table, seq_lens, kv_end=prefix, **step),
    swa_decode(query, cache, block_table, seq_lens, kv_start=prefix, **step),
]
outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
merged, _ = merge_states(outs, lses, sinks=sinks, gate=gate)

whole = swa_decode(query, cache, block_table, seq_lens, window=None, sinks=sinks, gate=gate)
print("largest difference between the merged parts and the whole:", (merged - whole).abs().max().item())
torch.testing.assert_close(merged, whole)
