"""Everything that the bench compares, by name: one module a rival or framework."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders.base import Contender, Machine
from benchmarks.contenders.fa3 import FlashAttention3
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.original import Original
from benchmarks.contenders.ours_jax import Jitted, Single
from benchmarks.contenders.ours_torch import Fp8, OriginalPlan, TorchEager, TorchGluon, TorchGraph
from benchmarks.contenders.unified import Unified

CONTENDERS: dict[str, Contender] = {
    each.name: each
    for each in (
        Floor(),
        TorchGraph(),
        TorchGluon(),
        TorchEager(),
        OriginalPlan(),
        Fp8(),
        Jitted("jax jit"),
        Single(),
        Original(),
        Unified(),
        FlashAttention3(),
        Jitted("xla gather", "xla"),
    )
}
"""In the order of the report's columns."""

DEFAULT = "default"


def plain(name: str) -> str:
    """Return a name as it is compared: ``fa3 + gate``, ``fa3-gate`` and ``FA3+gate`` are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def choose(asked: Sequence[str], machine: Machine) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that run on a machine, and why each of the others that were asked for does not.

    Raises:
        ValueError: no such contender, or none of those asked for can run.
    """
    known = {plain(name): each for name, each in CONTENDERS.items()}
    for name in asked:
        if plain(name) not in (*known, DEFAULT):
            raise ValueError(f"--contender must be one of {', '.join(CONTENDERS)} or {DEFAULT}, got {name!r}")
    wanted = {plain(name) for name in asked or (DEFAULT,)}
    chosen = [each for name, each in known.items() if name in wanted or (DEFAULT in wanted and each.default)]
    reasons = {each.name: each.absent(machine) for each in chosen}
    absent = {name: why for name, why in reasons.items() if why is not None}
    present = [each for each in chosen if each.name not in absent]
    if not present:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in absent.items()))
    return present, absent
