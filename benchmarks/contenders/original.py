"""The original kernel: vLLM 0.33.0's ``swa_decode_gated`` with its own planner, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.contenders.base import NO_CUDA, TOLERANCE, Machine, Way, graph_way
from benchmarks.contenders.ours_torch import original_plan
from benchmarks.fetch_peers import ORIGINAL_FILES
from benchmarks.tensors import Tensors

MOST_GROUP = 16


def unfit(case: Case) -> str | None:
    """Return why the original cannot do a case, or None."""
    if (case.k_dim, case.v_dim) != (192, 192):
        return f"head size {case.k_dim}/{case.v_dim}, not 192"
    if case.group > MOST_GROUP:
        return f"group {case.group}, more than {MOST_GROUP}"
    if case.sinks or case.softcap is not None or not case.gate:
        return "it has a gate, and neither sinks nor softcap"
    return None


def launch(case: Case, t: Tensors) -> Callable[[int], None]:
    """Return a call of the original's wrapper on a rotation."""
    kernel = peers.original_kernel()
    assert kernel is not None
    pack, splits = original_plan(case)
    options: dict[str, Any] = {
        "scale": case.k_dim**-0.5, "window": case.window, "query_len": case.query_len, "splits": splits, "pack": pack,
    }  # fmt: skip

    def run(index: int) -> None:
        table = t.tables[index % len(t.tables)]
        kernel(t.query, t.key_cache, t.value_cache, table, t.seq_lens, t.gate, t.output, **options)

    return run


class Original:
    """See the module."""

    name, default, tolerance = "original", True, TOLERANCE

    def absent(self, machine: Machine) -> str | None:
        """It needs a GPU and its files."""
        return NO_CUDA if not machine.cuda else peers.absent(ORIGINAL_FILES)

    def unfit(self, case: Case) -> str | None:
        """It was made for one head size."""
        return unfit(case)

    def prepare(self, case: Case, tensors: Tensors) -> dict[str, Way]:
        """Return the one way."""
        pack, splits = original_plan(case)
        return {"graph": graph_way(launch(case, tensors), tensors, f"pack {pack}, splits {splits}")}
