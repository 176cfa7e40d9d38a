"""Steps of the sizes that GPU kernels are written for: long windows, wide heads, many tiles a program, large pages.

The contract's own cases are small, so that an interpreter can run them: few of them fill a tile. These run over every
kernel of a GPU, by the same rules: right by the tolerance rule, and bitwise blind to what no row sees.
"""

from dataclasses import replace

import numpy as np
import pytest

from swa_plan import LAYOUTS, CacheLayout, cases, tolerance
from swa_plan.cases import Case
from tests.contract.backends import inputs_for, plan_for, run, same_bits
from tests.contract.torch_runner import GPU_BACKENDS

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("backend", GPU_BACKENDS)]


def larger(name, why, *, seq_lens=(700, 512, 33), window=512, block=64, heads=16, kv_heads=1, dim=192, **fields):
    """Return a case whose table holds its longest request."""
    fields = {"k_dim": dim, "v_dim": dim, "max_blocks": -(-max(seq_lens) // block), **fields}
    return Case(name, why, seq_lens, window, block=block, heads=heads, kv_heads=kv_heads, **fields)


# Case, splits and pack: None leaves them to the planner.
FORMS = [
    (larger("one-tile", "a tile, and nothing else", seq_lens=(64,), window=64, dim=64), 1, 1),
    (larger("head-of-tile", "a chunk that starts inside a tile", seq_lens=(64,), window=20, dim=64), 1, 1),
    (larger("inside-a-tile", "a chunk with both ends inside a tile", seq_lens=(50, 17), window=16, dim=64), 1, 1),
    (larger("nine-tiles", "more tiles than a pipeline has stages"), 1, 1),
    (larger("splits", "chunks that start and end inside tiles"), 4, 1),
    (larger("short-and-long", "chunks without keys beside full ones", seq_lens=(2000, 1, 0, 64)), 8, 1),
    (larger("long-sums", "sums over many tiles", seq_lens=(3000, 1500, 33), window=None), 1, 1),
    (larger("long-splits", "partials of many tiles", seq_lens=(3000, 1500, 33), window=None), 2, 1),
    (larger("long-verify", "64 rows and many tiles", seq_lens=(3000, 9), window=None, query_len=4), 1, 4),
    (larger("verify-1", "rows in programs of their own", seq_lens=(700, 3), query_len=4), 1, 1),
    (larger("verify-4", "rows that share a program", seq_lens=(700, 512, 3), query_len=4), 1, 4),
    (larger("verify-4-split", "their partials", seq_lens=(700, 512, 3), query_len=4), 4, 4),
    (larger("verify-3-of-5", "a program with fewer rows", seq_lens=(700, 2), query_len=5, heads=8), 1, 3),
    (larger("group-3", "rows of a tile that are none", heads=6, kv_heads=2), None, None),
    (larger("group-48", "one row of many heads", heads=48), None, None),
    (larger("group-96", "heads in two tiles", heads=96), None, None),
    (larger("heads", "8 kv heads of 8", heads=64, kv_heads=8), None, None),
    (larger("dim-192-128", "keys wider than values", v_dim=128), None, None),
    (larger("dim-64-256", "values wider than keys", k_dim=64, v_dim=256), None, None),
    (larger("dim-80-112", "heads that are padded", k_dim=80, v_dim=112), None, None),
    (larger("dim-256", "the widest heads", seq_lens=(1500, 33), window=1024, dim=256), None, None),
    (larger("fp16", "the other dtype", dtype="float16"), None, None),
    (larger("gate", "gate, sinks and softcap at once", gate=True, sinks=True, softcap=20.0), 1, 1),
    (larger("gate-split", "and in the combine kernel", gate=True, sinks=True, softcap=20.0), 4, 1),
    (larger("range", "ranges that cut tiles", kv_range=((100, 300), (0, 0), (5, 40))), 2, 1),
    (larger("unknown-pages", "pages that are none", invalid_pages=((0, 5, -1), (1, 1, 99999))), 1, 1),
    (larger("beyond-the-table", "keys that no entry leads to", max_blocks=8), 1, 1),
    (larger("ragged", "padding, no rows, too many rows", seq_lens=(700, 5, 512, 3), query_len=4,
            row_counts=(4, 0, 5, 1), padding_rows=3), 1, 2),
    (larger("ragged-split", "their partials", seq_lens=(700, 5, 512, 3), query_len=4, row_counts=(4, 0, 5, 1),
            padding_rows=3), 3, 2),
    (larger("int64", "indices of 64 bits", index_dtype="int64"), 2, 1),
    (larger("wide-ids", "page ids that are known ones in 32 bits", index_dtype="int64",
            invalid_pages=((0, 5, 3 + (1 << 32)), (1, 7, -(1 << 33)))), 1, 1),
    (larger("last-page", "the last of 64 small pages unknown", seq_lens=(1013,), window=1008, block=16, dim=64,
            invalid_pages=((0, 63, -1),)), 1, 1),
    (larger("two-warpgroups", "32 rows of a few tiles", seq_lens=(330, 250, 100), window=200, heads=8, query_len=4),
     1, 4),
]  # fmt: skip


def check(case, backend, *, splits=None, pack=None):
    inputs = inputs_for(case, backend, seed=1)
    plan = plan_for(inputs, backend, splits=splits, pack=pack)
    out, lse = run(inputs, backend, plan=plan)
    tolerance.assert_close(out, inputs, out_dtype=inputs.out_dtype, actual_lse=lse)
    poisoned = run(inputs_for(case, backend, seed=1, poison=True), backend, plan=plan)
    assert same_bits(out, poisoned[0]), case
    assert lse is None or same_bits(lse, poisoned[1]), case


@pytest.fixture
def hopper_launches(monkeypatch, backend):
    """Return a list with an entry for each call that the Hopper kernel takes."""
    taken = []
    if backend == "gluon":
        from swa_torch._gluon import _launch

        launches = _launch.launches
        monkeypatch.setattr(_launch, "launches", lambda call: taken.append(call.plan) or launches(call))
    return taken


@pytest.mark.parametrize("case, splits, pack", FORMS, ids=[str(case) for case, _, _ in FORMS])
def test_every_form_is_right_and_blind_to_poison(case, splits, pack, backend, hopper_launches):
    check(case, backend, splits=splits, pack=pack)
    assert bool(hopper_launches) == (backend == "gluon"), "another kernel ran"


@pytest.mark.parametrize("name", ["two-warpgroups", "inside-a-tile", "verify-4-split"])
def test_repeats_agree_on_a_busy_gpu(name, backend):
    """A read that nothing orders gives other bits sooner or later."""
    import torch

    case, splits, pack = next(form for form in FORMS if form[0].name == name)
    inputs = inputs_for(replace(case, seq_lens=case.seq_lens * 88, max_blocks=case.max_blocks), backend, seed=1)
    plan = plan_for(inputs, backend, splits=splits, pack=pack)
    first, busy = run(inputs, backend, plan=plan)[0], torch.randn(2048, 2048, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(side):
            torch.mm(busy, busy)
        assert same_bits(run(inputs, backend, plan=plan)[0], first)


# Pages smaller than a tile, as large, larger, no power of two, and not of whole 16-byte rows of it.
@pytest.mark.parametrize("block", [16, 24, 32, 48, 64, 128, 256, 528])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_page_size_in_every_layout(layout, block, backend, hopper_launches):
    check(
        larger("pages", "pages of every size", seq_lens=(1200, 528, 33), block=block, layout=layout, heads=32,
               kv_heads=2), backend,
    )  # fmt: skip
    assert bool(hopper_launches) == (backend == "gluon" and block % 16 == 0)


@pytest.mark.parametrize("seed", range(60))
def test_random_combinations_of_features(seed, backend):
    rng = np.random.default_rng(seed)
    check(enlarged(cases.random_case(rng), rng), backend)


def enlarged(case, rng):
    """Return a random case with long sequences, wide heads and large pages, and without what a 16-bit cache has not."""

    def pick(*choices):
        return choices[int(rng.integers(len(choices)))]

    most, block, k_dim = pick(100, 700, 1500), pick(16, 32, 48, 64, 64, 128, 528), pick(64, 80, 128, 192, 256)
    one_axis = "kv" in CacheLayout(case.layout).axes
    seq_lens = tuple(length and int(rng.integers(1, most)) for length in case.seq_lens)
    bounds = np.sort(rng.integers(-4, most, (len(seq_lens), 2)), axis=1).tolist()
    columns = -(-max(seq_lens) // block)
    return replace(
        case, seq_lens=seq_lens, block=block, max_blocks=max(1, columns - pick(0, 0, 0, 1)),
        window=pick(None, 1, 100, 512, 1024), k_dim=k_dim, v_dim=k_dim if one_axis else pick(k_dim, 64, 112, 192),
        heads=case.kv_heads * pick(1, 3, 8, 12, 16, 48), dtype=pick("bfloat16", "float16"), cache_dtype=None,
        kv_range=None if case.kv_range is None else tuple(map(tuple, bounds)),
    )  # fmt: skip
