"""``interpret`` in a process of its own, because Triton interprets or compiles for the whole life of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from bridge.parity import Outcome
from swa_plan.cases import CASES, Case


class Interpreter:
    """Runs ``swa check --backend interpret`` beside this process, from ``with`` on.

    Args:
        cases: named cases, then random ones drawn from the seed.
        seed: of the random cases and of all data.
    """

    def __init__(self, cases: Sequence[Case], *, seed: int) -> None:
        self.cases = cases
        named = [case.name for case in cases if case in CASES]
        options = ("--backend", "interpret", "--json", "--seed", str(seed), "--cases", str(len(cases) - len(named)))
        self._command = [sys.executable, "-m", "bridge._cli", "check", *options, *named]

    def __enter__(self) -> Interpreter:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            self._command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # does nothing to one that has ended
        self._process.communicate()

    def outcomes(self) -> list[Outcome]:
        """Wait for the process; return what it found, or for each case that it failed."""
        output, errors = self._process.communicate()
        if self._process.returncode in (0, 1) and output:
            return [Outcome.from_json(values) for values in json.loads(output)["outcomes"]]
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        reason = f"its process ended with {self._process.returncode}: {last}"
        return [Outcome.failed(case, "interpret", reason) for case in self.cases]
