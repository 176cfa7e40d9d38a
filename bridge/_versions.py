"""Versions whose exchange was tested. Order between two frameworks is what neither of them promises in its manual."""

from __future__ import annotations

import functools
import re
from importlib.metadata import version
from typing import NamedTuple

LEAST = {"torch": (2, 11), "jax": (0, 10, 2)}

ORDER_TESTED = (("2.11", "0.11"),)
"""(torch, jax) on whose GPU path the race and lifetime tests ran (one H200)."""

VALUES_TESTED = (*ORDER_TESTED, ("2.13", "0.10"), ("2.13", "0.12"))
"""(torch, jax) with which the tests ran on a CPU."""


class Pair(NamedTuple):
    """Installed versions, and what is known of them together: ``order tested``, ``values tested`` or ``untested``."""

    torch: str
    jax: str
    status: str


def pair_of(torch: str, jax: str) -> Pair:
    """Return what is known of two versions.

    Raises:
        NotImplementedError: one is older than the bridge supports.
    """
    for name, found in (("torch", torch), ("jax", jax)):
        least = LEAST[name]
        if tuple(int(part) for part in re.findall(r"\d+", found)[: len(least)]) < least:
            raise NotImplementedError(
                f"{name} must be at least {'.'.join(map(str, least))} for the bridge, got {found}"
            )
    minor = (_minor(torch), _minor(jax))
    status = "order tested" if minor in ORDER_TESTED else "values tested" if minor in VALUES_TESTED else "untested"
    return Pair(torch, jax, status)


@functools.cache
def check_versions() -> Pair:
    """Return what is known of the installed versions.

    Raises:
        NotImplementedError: one is older than the bridge supports.
    """
    return pair_of(version("torch"), version("jax"))


def check_order_tested(allow_untested: bool) -> None:
    """Check that order on a GPU was tested with the installed versions.

    Raises:
        RuntimeError: it was not, and ``allow_untested`` is false.
        NotImplementedError: one is older than the bridge supports.
    """
    pair = check_versions()
    if pair.status == "order tested" or allow_untested:
        return
    tested = ", ".join(f"torch {torch} with jax {jax}" for torch, jax in ORDER_TESTED)
    raise RuntimeError(
        f"versions must be ones whose order on a GPU was tested ({tested}), got torch {pair.torch} with jax "
        f"{pair.jax}: install those, or run the race tests (tests/bridge) here and pass allow_untested=True"
    )


def interpreter_fault(triton: str | None, numpy: str | None) -> str | None:
    """Return why Triton's interpreter fails with these versions, and the mend; None if it does not."""
    if triton is None or numpy is None or _numbers(triton) >= (3, 9) or _numbers(numpy) < (2, 4):
        return None
    return f"the interpreter of triton {triton} fails with numpy {numpy}: it needs triton>=3.9 or numpy<2.4"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _minor(text: str) -> str:
    return ".".join(map(str, _numbers(text)))
