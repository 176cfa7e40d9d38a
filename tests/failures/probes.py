"""Builds the small decode steps of the failure reports, and the probes that make a wrong answer visible.

A report's E(e) probe (query 0, V = 1 at position e and 0 elsewhere) shows the weight of one key. Every dimension of V
can carry a position of its own, so one call shows up to ``v_dim`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from swa_plan import reference
from swa_plan._dtypes import numpy_dtype
from swa_plan.cases import Inputs
from tests.contract.backends import BACKENDS, INTERPRETED, plan_for, run

RUNNERS = BACKENDS if INTERPRETED else (*BACKENDS, "reference")
"""Everything that computes a step, the reference among them."""

DTYPE = "float16" if INTERPRETED else "bfloat16"
"""The reports' bf16; fp16 where Triton interprets."""

KV_HEADS = 1 if INTERPRETED else 8
"""The reports' 8 kv heads; one where each takes a second to interpret."""

GROUP = 12
BF16_TOLERANCE = 2e-2
"""The reports' own bound for |V| ~ 1 in bf16, where results of two splits or batches are compared with each other."""


def step(
    seq_lens: Sequence[int],
    *,
    window: int | None = 512,
    query_len: int = 1,
    kv_heads: int = KV_HEADS,
    heads: int | None = None,
    k_dim: int = 192,
    v_dim: int | None = None,
    block: int = 16,
    max_blocks: int | None = None,
    pages: int | None = None,
    dtype: str = DTYPE,
    tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Inputs:
    """Return a step of random queries, keys and values, each request's pages in random order, two pages to spare."""
    rng = np.random.default_rng(seed)
    heads = kv_heads * GROUP if heads is None else heads
    v_dim = k_dim if v_dim is None else v_dim
    owned = [-(-max(length, 0) // block) for length in seq_lens]
    columns = max([1, *owned]) if max_blocks is None else max_blocks
    pages = sum(owned) + 2 if pages is None else pages
    free = iter(rng.permutation(pages))
    table = np.zeros((len(seq_lens), columns), np.int32)
    for request, count in enumerate(owned):
        table[request, :count] = [next(free) for _ in range(count)]
    number = numpy_dtype(dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(number)

    return Inputs(
        query=normal(len(seq_lens) * query_len if tokens is None else tokens, heads, k_dim),
        bases=(normal(pages, block, kv_heads, k_dim), normal(pages, block, kv_heads, v_dim)),
        layout="pages block kv_heads dim",
        k_dim=k_dim,
        v_dim=v_dim,
        block_table=table,
        seq_lens=np.array(seq_lens, np.int32),
        window=window,
        query_len=query_len,
        return_lse=True,
        **options,
    )


def decode(
    inputs: Inputs, runner: str, *, splits: int | None = None, pack: int | None = None, **overrides: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(out, lse)`` of a backend or of the reference, which knows no splits."""
    if runner == "reference":
        out, lse = reference.swa_decode(*inputs.arrays(), **inputs.reference_options(), return_lse=True)
        return out, lse
    if splits is not None or pack is not None:
        overrides["plan"] = plan_for(inputs, runner, splits=splits, pack=pack)
    out, lse = run(inputs, runner, **overrides)
    assert lse is not None
    return out, lse


def place(inputs: Inputs, request: int, positions: int | Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(pages, offsets)`` of positions of a request: indices of the first two cache axes."""
    position = np.asarray(positions)
    block = inputs.key_cache.shape[1]
    return inputs.block_table[request, position // block], position % block


def live(inputs: Inputs, request: int) -> np.ndarray:
    """Return the positions that some row of a uniform request sees."""
    length = max(int(inputs.seq_lens[request]), 0)
    low = 0 if inputs.window is None else max(0, length - inputs.query_len - inputs.window + 1)
    return np.arange(low, length)


def visible(position: int, window: int | None) -> range:
    """Return the keys that a row at ``position`` sees."""
    return range(max(0, position - window + 1) if window is not None else 0, position + 1)


def row_positions(inputs: Inputs) -> list[int]:
    """Return each row's position, uniform rows."""
    rows = range(inputs.query_len)
    return [int(length) - inputs.query_len + row for length in np.maximum(inputs.seq_lens, 0) for row in rows]


def count_probe(inputs: Inputs) -> Inputs:
    """Make it the CNT probe: query 0 and V 1, so that the weights of a row add to 1."""
    inputs.query[...] = 0
    inputs.value_cache[...] = 1
    return inputs


def id_probe(inputs: Inputs) -> Inputs:
    """Make it the ID probe: query 0, and V is the request's number + 1."""
    inputs.query[...] = 0
    for request, length in enumerate(inputs.seq_lens):
        inputs.value_cache[place(inputs, request, np.arange(max(int(length), 0)))] = request + 1
    return inputs


def weight_probe(inputs: Inputs, positions: Sequence[Sequence[int]]) -> Inputs:
    """Make it the E(e) probe: dimension j of a request's rows is the weight of the key at its ``positions[j]``."""
    inputs.query[...] = 0
    inputs.value_cache[...] = 0
    for request, chosen in enumerate(positions):
        for j, position in enumerate(chosen):
            page, offset = place(inputs, request, position)
            inputs.value_cache[page, offset, :, j] = 1
    return inputs


def even_weights(inputs: Inputs, positions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return what ``weight_probe`` must show, ``[tokens, 1, v_dim]``: 1 / visible keys, or 0."""
    expected = np.zeros((len(inputs.query), 1, inputs.v_dim))
    for token, position in enumerate(row_positions(inputs)):
        keys = visible(position, inputs.window)
        for j, chosen in enumerate(positions[token // inputs.query_len]):
            expected[token, 0, j] = 1 / len(keys) if chosen in keys else 0.0
    return expected


def assert_exact(actual: np.ndarray, expected: Any) -> None:
    """Assert that values are ``expected`` rounded to their dtype; float64 is the reference's and may be an ulp off."""
    wanted = np.broadcast_to(np.asarray(expected, np.float64), actual.shape)
    if actual.dtype == np.float64:
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=0)
    else:
        np.testing.assert_array_equal(actual.astype(np.float64), wanted.astype(actual.dtype).astype(np.float64))


def with_invisible(inputs: Inputs, value: float, *, keys: bool = True, values: bool = True) -> Inputs:
    """Return the step with every slot that no row sees holding ``value``."""
    marked = np.zeros(inputs.key_cache.shape[:2], bool)
    for request in range(len(inputs.seq_lens)):
        marked[place(inputs, request, live(inputs, request))] = True
    bases = tuple(base.copy() for base in inputs.bases)
    for base, chosen in zip(bases, (keys, values), strict=True):
        if chosen:
            base[~marked] = value
    return replace(inputs, bases=bases)


def with_unused_entries(inputs: Inputs, entry: int) -> Inputs:
    """Return the step with every table entry that no visible key needs set to ``entry``."""
    table = np.full_like(inputs.block_table, entry)
    block = inputs.key_cache.shape[1]
    for request in range(len(inputs.seq_lens)):
        needed = np.unique(live(inputs, request) // block)
        table[request, needed] = inputs.block_table[request, needed]
    return replace(inputs, block_table=table)


def with_free_page_0(inputs: Inputs) -> Inputs:
    """Return the step with one more page in front of the pool, which no request owns."""
    bases = tuple(np.concatenate((np.zeros_like(base[:1]), base)) for base in inputs.bases)
    return replace(inputs, bases=bases, block_table=inputs.block_table + 1)


def clean(inputs: Inputs) -> Inputs:
    """Return the step with zeros in all slots and table entries that no row needs."""
    return with_unused_entries(with_invisible(inputs, 0.0), 0)


def subset(inputs: Inputs, requests: Sequence[int]) -> Inputs:
    """Return the step of some of its requests, uniform rows."""
    tokens = [request * inputs.query_len + row for request in requests for row in range(inputs.query_len)]
    chosen = list(requests)
    return replace(
        inputs,
        query=inputs.query[tokens],
        block_table=inputs.block_table[chosen],
        seq_lens=inputs.seq_lens[chosen],
        gate=None if inputs.gate is None else inputs.gate[tokens],
    )
