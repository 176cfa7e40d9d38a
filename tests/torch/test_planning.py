"""``plan_for``: from real, fake and meta tensors alike, and what a plan then serves."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from swa_plan import DeviceProfile
from swa_plan._chosen import cached_plan
from swa_torch import PagedCache, Plan, plan_for, swa_decode
from tests.contract.backends import INTERPRETED
from tests.torch.helpers import make_step, same_bits

KERNEL = "interpret" if INTERPRETED else "ops"


@pytest.fixture
def step():
    return make_step((20, 5, 0, 33))


def test_a_plan_of_real_tensors(step):
    plan = plan_for(*step[:3], window=16)
    problem = plan.problem
    assert plan.kernel == KERNEL
    assert (problem.max_requests, problem.max_tokens, problem.max_blocks, problem.block) == (4, 4, 3, 16)
    assert (problem.heads, problem.kv_heads, problem.k_dim, problem.v_dim) == (8, 2, 64, 64)
    assert (problem.dtype, problem.cache_dtype, problem.window, problem.ragged) == ("float32", "float32", 16, False)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_fake_and_meta_tensors_give_the_same_plan(cache_dtype):
    def make(device):
        cache = PagedCache.empty(
            "layers pages kv_heads block (kv dim)", pages=9, block=16, kv_heads=2, k_dim=192, v_dim=128, layers=3,
            dtype=cache_dtype, device=device,
        )  # fmt: skip
        query = torch.empty(8, 16, 192, dtype=torch.bfloat16, device=device)
        return query, cache, torch.empty(4, 100, dtype=torch.int32, device=device)

    options = {"window": 512, "query_len": 2, "device": DeviceProfile.named("h200"), "batch_invariant": True}
    plans = [
        plan_for(*make("cpu"), **options),
        plan_for(*make("meta"), **options),
        plan_for(*make("cpu"), layer=2, **options),
    ]
    with FakeTensorMode():
        plans.append(plan_for(*make("cpu"), **options))
        if torch.cuda.is_available():
            plans.append(plan_for(*make("cuda"), **options))
    assert len(set(plans)) == 1
    assert (plans[0].kernel, plans[0].device) == ("portable", "h200")


def test_plans_are_made_once(step):
    first = plan_for(*step[:3], window=16)
    hits = cached_plan.cache_info().hits
    assert plan_for(*step[:3], window=16) is first
    assert cached_plan.cache_info().hits == hits + 1


@pytest.mark.parametrize("invariant", [False, True])
def test_one_plan_serves_smaller_batches_and_narrower_tables(invariant):
    step = make_step((20, 5, 0, 33, 48, 47, 2), max_blocks=3)
    plan = plan_for(*step[:3], window=16, max_requests=64, batch_invariant=invariant)
    plan = replace(plan, splits=max(2, plan.splits))
    whole = swa_decode(*step, window=16, plan=plan)
    for size in (7, 4, 1, 0):
        batch = (step.query[:size], step.cache, step.block_table[:size], step.seq_lens[:size])
        torch.testing.assert_close(swa_decode(*batch, window=16, plan=plan), whole[:size])
    narrow = (step.query[:2], step.cache, step.block_table[:2, :2], step.seq_lens[:2])
    torch.testing.assert_close(swa_decode(*narrow, window=16, plan=plan), whole[:2])


def test_max_requests(step):
    plan = plan_for(*step[:3], window=16, max_requests=100, query_len=1)
    assert (plan.problem.max_requests, plan.problem.max_tokens) == (100, 100)
    ragged = plan_for(*step[:3], window=16, max_requests=100, query_len=3, ragged=True)
    assert (ragged.problem.max_tokens, ragged.problem.ragged) == (300, True)
    fewer = plan_for(*step[:3], window=16, max_requests=2)
    with pytest.raises(ValueError, match="plan was made for max_requests up to 2, got 4"):
        swa_decode(*step, window=16, plan=fewer)


def test_a_plan_through_json_gives_the_same_bits(step):
    plan = replace(plan_for(*step[:3], window=16), splits=3)
    restored = Plan.from_json(plan.to_json())
    assert restored == plan
    assert same_bits(swa_decode(*step, window=16, plan=restored), swa_decode(*step, window=16, plan=plan))


def test_padding_tokens_are_planned_for():
    step = make_step((20, 5), tokens=9)
    plan = plan_for(*step[:3], window=16, query_len=3, ragged=True)
    assert plan.problem.max_tokens == 9
    edges = torch.tensor([0, 3, 4], dtype=torch.int32)
    assert (swa_decode(*step, window=16, query_len=3, cu_query_lens=edges, plan=plan)[4:] == 0).all()
    with pytest.raises(ValueError, match="max_tokens up to 9, got 10"):
        swa_decode(step.query.repeat(2, 1, 1)[:10], *step[1:], window=16, query_len=3, cu_query_lens=edges, plan=plan)


def test_backends_are_checked(step):
    assert plan_for(*step[:3], window=16, backend="triton", device=DeviceProfile.named("a100")).device == "a100"
    with pytest.raises(ValueError, match="backend 'triton' needs tensors on a CUDA device, got cpu"):
        plan_for(*step[:3], window=16, backend="triton")
    with pytest.raises(ValueError, match="kernel 'portable' needs a GPU"):
        plan_for(*step[:3], window=16, backend="triton", device=DeviceProfile.named("cpu"))


def test_no_data_are_read(step):
    step.block_table.fill_(-1)
    step.seq_lens.fill_(10**9)
    step.query.fill_(torch.nan)
    assert plan_for(*step[:3], window=16).problem.max_requests == 4
