"""What a GPU gives, replaced: graphs, the floor's timers, the original kernel and FlashAttention 3's operators."""

from importlib.util import find_spec

import pytest

_ABSENT = [name for name in ("torch", "triton", "benchmarks") if find_spec(name) is None]
# Cases need no Triton; nothing here runs without torch, or without the checkout.
collect_ignore = ["test_contenders.py", "test_trace_time.py"] if _ABSENT else []
if _ABSENT not in ([], ["triton"]):
    collect_ignore += ["test_cases.py"]

FWD = """fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out,
Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,
Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
METADATA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin)
-> Tensor"""
"""Signatures as the library registers them."""


class FakeGraph:
    """Runs what a graph would replay."""

    def __init__(self, launch, calls):
        self.launch, self.calls, self.times = launch, calls, 0
        for index in range(calls):
            launch(index)

    def measure(self):
        self.times += 1
        return float(self.calls)


@pytest.fixture
def fake_gpu(monkeypatch):
    import swa_torch
    from benchmarks import peers, tensors, timing
    from benchmarks.contenders import original, ours_jax, ours_torch

    monkeypatch.setattr(timing, "GraphTimer", FakeGraph)
    monkeypatch.setattr(tensors, "rotations", lambda read_bytes: 2)
    monkeypatch.setattr(ours_jax, "jitted_calls", lambda case: 2)
    floors = {name: FakeGraph(lambda index: None, calls) for name, calls in (("stream a", 3), ("stream b", 2))}
    monkeypatch.setattr(timing, "floor_timers", lambda read_bytes: floors)
    for module in (original, ours_torch):
        monkeypatch.setattr(module, "original_plan", lambda case: (case.query_len, 2))
    monkeypatch.setattr(peers, "original_kernel", lambda: swa_torch.swa_decode_gated)


@pytest.fixture
def fake_fa3(monkeypatch):
    """Registers the library's operators, computed by ours."""
    import torch

    import swa_torch
    from benchmarks import peers

    calls = []

    def fwd(
        q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank,
        cp_tot_seqused_k,
    ):  # fmt: skip
        absent = (k_new, v_new, q_v, cu_seqlens_k, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k, rotary_cos,
                  rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, pack_gqa, cp_tot_seqused_k)  # fmt: skip
        assert absent == (None,) * len(absent)
        assert is_causal
        assert (window_size_right, sm_margin, cp_world_size, cp_rank) == (0, 0, 1, 0)
        assert cu_seqlens_q.tolist() == [max_seqlen_q * request for request in range(len(seqused_k) + 1)]
        assert max_seqlen_k == int(seqused_k.max())
        calls.append((scheduler_metadata is not None, num_splits))
        swa_torch.swa_decode(
            q, (k, v), page_table, seqused_k, window=window_size_left + 1, query_len=max_seqlen_q, scale=softmax_scale,
            softcap=softcap or None, sinks=s_aux, out=out,
        )  # fmt: skip
        return [out]

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
        cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size, max_seqlen_k_new, is_causal,
        window_size_left, window_size_right, has_softcap, num_splits, pack_gqa, sm_margin,
    ):  # fmt: skip
        calls.append(
            (batch_size, max_seqlen_q, num_heads, num_heads_k, headdim, headdim_v, page_size, window_size_left)
        )
        assert (cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, pack_gqa) == (None,) * 5
        assert (max_seqlen_k_new, is_causal, window_size_right, num_splits, sm_margin) == (0, True, 0, 32, 0)
        assert max_seqlen_k == int(seqused_k.max())
        return torch.zeros(4, dtype=torch.int32)

    with torch.library._scoped_library("_vllm_fa3_C", "DEF") as library:
        library.define(FWD.replace("\n", " "))
        library.define(METADATA.replace("\n", " "))
        library.impl("fwd", fwd, "CPU")
        library.impl("get_scheduler_metadata", get_scheduler_metadata, "CPU")
        monkeypatch.setattr(peers, "flash_attention_3", lambda: torch.ops._vllm_fa3_C)
        yield calls
