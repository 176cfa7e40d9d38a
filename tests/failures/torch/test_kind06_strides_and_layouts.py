"""Kind 6 of the known failures: strides are taken as they come, layouts are named, wrong ones are refused."""

from __future__ import annotations

import pytest
import torch

import swa_torch
from swa_plan import tolerance
from tests.contract.backends import plan_for
from tests.contract.torch_runner import BACKENDS, INTERPRETED, device_of, to_numpy, torch_arguments
from tests.failures.probes import KV_HEADS, step

HEADS = KV_HEADS * 12


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def arguments(backend, *arguments, **options):
    """Return a step's inputs and its tensors: inputs, query, (key_cache, value_cache), table, lens."""
    inputs = step(*arguments, **options)
    (query, cache, table, lens), _ = torch_arguments(inputs, device_of(backend))
    return inputs, query, cache.bases, table, lens


def interleaved(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the two halves of one ``[pages, 2, block, kv_heads, dim]`` tensor."""
    halves = torch.stack((key, value), dim=1).unbind(1)
    assert halves[0].stride(0) == 2 * key.stride(0)
    return halves


@pytest.mark.parametrize("splits", [1, 4])
def test_page_stride_of_interleaved_keys_and_values(backend, splits):
    """C40, ROCm/aiter#3498: the page stride is not block times slot stride."""
    inputs, query, (key, value), table, lens = arguments(backend, (1, 17, 200) if INTERPRETED else (1, 17, 200, 500))
    call = {"window": 512, "plan": plan_for(inputs, backend, splits=splits)}
    expected = swa_torch.swa_decode(query, (key, value), table, lens, **call)
    key_view, value_view = interleaved(key, value)
    for cache in ((key_view, value_view), (key_view, value), (key, value_view)):
        assert torch.equal(swa_torch.swa_decode(query, cache, table, lens, **call), expected)
    tolerance.assert_close(to_numpy(expected), inputs)


def test_append_into_interleaved_keys_and_values(backend):
    """C40, ROCm/aiter#3498, on the way in: only the named slots change."""
    _, query, (key, value), _, _ = arguments(backend, (40,))
    views = interleaved(key, value)
    before = [view.clone() for view in views]
    rows = query.view(1, KV_HEADS, 12, 192)[:, :, :2].unbind(2)
    slot = torch.tensor([2 * 16 + 5], dtype=torch.int32, device=query.device)
    swa_torch.append(views, *rows, slot)
    for view, old, row in zip(views, before, rows, strict=True):
        old[2, 5] = row[0]
        assert torch.equal(view, old)


def test_heads_first_storage(backend):
    """C42, LMCache/LMCache#2826: HND storage as a permuted view, and by the name of its layout."""
    _, query, (key, value), table, lens = arguments(backend, (200, 33), kv_heads=2)
    expected = swa_torch.swa_decode(query, (key, value), table, lens, window=512)
    stored = tuple(base.permute(0, 2, 1, 3).contiguous() for base in (key, value))
    views = tuple(base.permute(0, 2, 1, 3) for base in stored)
    named = swa_torch.PagedCache(stored, "pages kv_heads block dim")
    assert (named.block, named.kv_heads) == (16, 2)
    assert torch.equal(swa_torch.swa_decode(query, views, table, lens, window=512), expected)
    assert torch.equal(swa_torch.swa_decode(query, named, table, lens, window=512), expected)


@pytest.mark.parametrize("requests, query_len", [(5, 1), (2, 4)])
def test_query_sliced_from_a_fused_projection(backend, requests, query_len):
    """C43, sgl-project/sglang#7462: the row stride is that of the whole projection."""
    inputs, query, cache, table, lens = arguments(backend, (100, 7, 60, 1, 33)[:requests], query_len=query_len)
    tokens = requests * query_len
    projection = torch.full((tokens, (HEADS + 2 * KV_HEADS) * 192), 9.0, dtype=query.dtype, device=query.device)
    projection[:, : HEADS * 192] = query.reshape(tokens, -1)
    sliced = projection[:, : HEADS * 192].view(tokens, HEADS, 192)
    call = {"window": 512, "query_len": query_len, "plan": plan_for(inputs, backend)}
    out = swa_torch.swa_decode(sliced, cache, table, lens, **call)
    assert torch.equal(out, swa_torch.swa_decode(query, cache, table, lens, **call))
    tolerance.assert_close(to_numpy(out), inputs)


@pytest.mark.parametrize("splits", [1, 4])
def test_output_slice_is_written_in_its_own_strides(backend, splits):
    """C45, flagos-ai/FlagGems#5235: the combine kernel too knows that the output's rows are further apart."""
    inputs, query, cache, table, lens = arguments(backend, (513, 40, 1))
    buffer = torch.full((3, HEADS + 6, 192), 7.0, dtype=query.dtype, device=query.device)
    out = buffer[:, 3 : 3 + HEADS]
    assert not out.is_contiguous()
    swa_torch.swa_decode(query, cache, table, lens, window=512, out=out, plan=plan_for(inputs, backend, splits=splits))
    assert (buffer[:, :3] == 7).all()
    assert (buffer[:, -3:] == 7).all()
    tolerance.assert_close(to_numpy(out.contiguous()), inputs)
    gate = torch.full((3, HEADS), 30.0, device=query.device)
    gated = torch.full_like(buffer, 7.0)
    swa_torch.swa_decode_gated(
        query, *cache, table, lens, gate, gated[:, 3 : 3 + HEADS],
        scale=192**-0.5, window=512, query_len=1, splits=splits,
    )  # fmt: skip
    assert (gated[:, :3] == 7).all()
    assert (gated[:, -3:] == 7).all()
    tolerance.assert_close(to_numpy(gated[:, 3:-3].contiguous()), inputs)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("kind", ["column-slice", "transposed", "expanded"])
def test_gate_of_any_strides(backend, kind, splits):
    """C46, lightseekorg/tokenspeed#198: a slice of a projection, a transposed and an expanded gate."""
    inputs, query, cache, table, lens = arguments(backend, (513, 40, 1))
    values = torch.randn(3, HEADS, generator=torch.Generator().manual_seed(0)).to(query.device)
    if kind == "column-slice":
        projection = torch.full((3, 21504 + HEADS), float("nan"), device=query.device)
        projection[:, -HEADS:] = values
        gate = projection[:, -HEADS:]
    elif kind == "transposed":
        gate = values.t().contiguous().t()
        assert gate.stride() == (1, 3)
    else:
        gate = values[:, :1].expand(3, HEADS)
        assert gate.stride(1) == 0
    call = {"window": 512, "plan": plan_for(inputs, backend, splits=splits)}
    out = swa_torch.swa_decode(query, cache, table, lens, gate=gate, **call)
    assert torch.equal(out, swa_torch.swa_decode(query, cache, table, lens, gate=gate.contiguous(), **call))
    inputs.gate = gate.cpu().numpy()
    tolerance.assert_close(to_numpy(out), inputs)


def test_strided_head_dim_is_refused_by_name(backend):
    """C48, InfiniTensor/InfiniCore#1149: a last stride other than 1 is an error, never a silent copy of the cache."""
    _, query, (key, value), table, lens = arguments(backend, (40,), kv_heads=2)
    wide = torch.zeros(1, 24, 2 * 192, dtype=query.dtype, device=query.device)

    def strided(cache: torch.Tensor) -> torch.Tensor:
        return cache.transpose(-1, -2).contiguous().transpose(-1, -2)

    def call(query=query, key=key, value=value, **options):
        swa_torch.swa_decode(query, (key, value), table, lens, window=512, backend=backend, **options)

    call()
    with pytest.raises(ValueError, match=r"query.*stride.*1.*dim 2"):
        call(query=wide[..., ::2])
    with pytest.raises(ValueError, match=r"out.*stride.*1.*dim 2"):
        call(out=wide[..., ::2])
    with pytest.raises(ValueError, match=r"key_cache.*stride.*1.*dim 3"):
        call(key=strided(key))
    with pytest.raises(ValueError, match=r"value_cache.*stride.*1.*dim 3"):
        call(value=strided(value))
    assert (wide == 0).all()
