"""One decode step as a serving engine runs it: append the new token's key and value, then attend to the window.

    python examples/decode_step.py

Runs on a GPU if there is one. The batch is padded to four requests, as a CUDA graph would have it.
"""

import torch

from swa_torch import PagedCache, append, plan_for, swa_decode, warmup

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, kv_heads, dim, block, window = 16, 2, 128, 16, 128

cache = PagedCache.empty(
    "pages kv block kv_heads dim", pages=64, block=block, kv_heads=kv_heads, k_dim=dim, device=device
)
cache.bases[0].normal_()  # what a prefill would have written
block_table = torch.randperm(64, device=device).to(torch.int32).view(4, 16)
seq_lens = torch.tensor([200, 57, 1, 0], dtype=torch.int32, device=device)  # the last one is padding

query = torch.randn(4, heads, dim, dtype=torch.bfloat16, device=device)
gate = torch.randn(4, heads, dtype=torch.bfloat16, device=device)
key, value = torch.randn(2, 4, kv_heads, dim, dtype=torch.bfloat16, device=device)

# Once: a plan that serves every batch of up to four requests, and its kernels compiled.
plan = plan_for(query, cache, block_table, window=window)
warmup(plan, query, cache, gate=gate, return_lse=True, key=key, value=value)

# Every step: slot = page * block + offset of the newest token; padding writes nothing.
position = (seq_lens - 1).long()
page = block_table.gather(1, position.clamp(min=0)[:, None] // block)[:, 0]
slots = torch.where(seq_lens > 0, page * block + position % block, -1)
append(cache, key, value, slots)
out, lse = swa_decode(query, cache, block_table, seq_lens, window=window, gate=gate, return_lse=True, plan=plan)

print(plan.explain())
print("out", tuple(out.shape), "padding row is zero:", not out[3].any().item(), "its lse:", lse[3, 0].item())
