"""Sampled rows of a replay against float64, by the project's tolerance rule.

The sampled request's pages are copied to the host as they are, slots outside the window and all: the reference reads
what the contract lets it read, so that a NaN from a freed page or a wrong page id shows as a miss.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge._replay.result import CheckRecord
from bridge._replay.runner import RowsSeen
from swa_plan import reference, tolerance
from swa_plan.cases import Inputs
from swa_plan.models import ModelShape

TWO_ARRAYS = "pages block kv_heads dim"


def check_rows(
    seen: RowsSeen,
    *,
    model: ModelShape,
    seq_len: int,
    first_block: int,
    max_blocks: int,
    options: dict[str, Any],
    step: int,
    request: int,
    layer: int,
) -> list[CheckRecord]:
    """Compare one request's rows, by whomever they were decoded.

    Args:
        seen: what the request gave and got; its pages are those of the table's columns from ``first_block`` on.
        model: the shape that was decoded.
        seq_len: keys of the request, this step's included.
        first_block: first column of the block table that holds a page.
        max_blocks: columns of the block table.
        options: sinks and scales, as the step had them.
        step: for the record.
        request: for the record.
        layer: for the record.

    Returns:
        A record for each of ``seen.outs``.
    """
    table = np.full((1, max_blocks), -1, np.int32)
    table[0, first_block : first_block + len(seen.key_cache)] = np.arange(len(seen.key_cache))
    inputs = Inputs(
        query=seen.query,
        bases=(seen.key_cache, seen.value_cache),
        layout=TWO_ARRAYS,
        k_dim=model.k_dim,
        v_dim=model.v_dim,
        block_table=table,
        seq_lens=np.array([seq_len], np.int32),
        window=model.window,
        gate=seen.gate,
        query_len=model.query_len,
        softcap=model.softcap,
        **options,
    )
    stored = _stored_as_given(seen, seq_len, first_block, options)
    records = []
    for decoded_by, out in seen.outs.items():
        report = tolerance.compare(out, inputs)
        faults = [] if report.ok else [report.message]
        if not np.isfinite(out.astype(np.float64)).all():
            # The reference sees the same table and pages, so that its NaN would match.
            faults.append("the output is not finite: a page that the window needs was freed, lost or never filled")
        if not stored:
            faults.append("append stored other keys or values than it was given")
        records.append(
            CheckRecord(
                step=step,
                request=request,
                layer=layer,
                decoded_by=decoded_by,
                rows=len(seen.query),
                ratio=float(report.ratio),
                error=float(report.worst_error),
                limit=float(report.worst_limit),
                ok=not faults,
                message="; ".join(faults),
            )
        )
    return records


def _stored_as_given(seen: RowsSeen, seq_len: int, first_block: int, options: dict[str, Any]) -> bool:
    """Tell whether the cache holds, bit by bit, what append had to store for this step's tokens."""
    block = seen.key_cache.shape[1]
    positions = np.arange(seq_len - len(seen.key), seq_len)
    slots = (positions - first_block * block).astype(np.int32)
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    expected = reference.append(seen.key_cache, seen.value_cache, seen.key, seen.value, slots, **scales)
    actual = (seen.key_cache, seen.value_cache)
    return all(
        np.array_equal(_bits(want[slots // block, slots % block]), _bits(have[slots // block, slots % block]))
        for want, have in zip(expected, actual, strict=True)
    )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
