"""The replay on both frameworks: torch owns the cache and appends to it, and they take turns to decode it.

Even steps are ``swa_torch``'s, odd ones ``swa_pallas``'s through a ``bridge.Session``, which has the cache and the
staging buffers registered once. Outside its time each step is decoded by the other one too, from the same bytes. JAX
compiles one program a padded batch, which takes its share of the buffers inside, so that batches are padded to powers
of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import swa_pallas
from bridge import Session
from bridge._replay import jax_runner
from bridge._replay.crossing import Addresses, Difference, Sharing, difference
from bridge._replay.engine import Geometry, ReplayConfig
from bridge._replay.jax_work import Work
from bridge._replay.runner import Compilation, StepTimes
from bridge._replay.torch_runner import TorchRunner, to_numpy
from bridge._steps import JaxStep
from bridge._versions import check_versions
from swa_plan import Plan
from swa_plan._shapes import next_power_of_two


def choose_backends() -> tuple[str, str]:
    """Return the backends of torch and of JAX: on a GPU where both have one, else on the CPU."""
    if torch.cuda.is_available() and jax.default_backend() == "gpu":
        return "triton", jax_runner.choose_backend()
    return "cpu", "xla"


class CrossedRunner(TorchRunner):
    """A `runner.Runner` on ``swa_torch`` and ``swa_pallas`` in turn.

    The replay compares with float64 what it decodes, so that it also runs versions whose order was never tested, and
    says so.

    Args:
        config: what is replayed.
        geometry: sizes of the cache.

    Raises:
        ValueError, TypeError, NotImplementedError: the cache cannot be shared, or the GPU is too old.
    """

    def __init__(self, config: ReplayConfig, geometry: Geometry) -> None:
        on_torch, on_jax = choose_backends()
        super().__init__(config, geometry, on_torch)
        self.backend = "crossed"
        self.framework = f"torch {torch.__version__} and jax {jax.__version__}"
        if self._cuda:
            self.clock = "CUDA events on torch's stream around graph replays and JAX's steps"
        self._backends = {"torch": on_torch, "jax": on_jax}
        buffers = {
            "cache": self._cache,
            "query": self._query,
            "gate": self._gate,
            "sinks": self._sinks,
            "block_table": self._table,
            "seq_lens": self._seq_lens,
        }
        self._session = Session(
            {name: buffer for name, buffer in buffers.items() if buffer is not None}, allow_untested=True
        )
        self._work = Work(config, on_jax)
        self._jax_plans: dict[int, Plan] = {}
        self._jax_steps: dict[int, JaxStep] = {}
        self._compile_s = 0.0
        self._decoded_by: list[str] = []
        self._outs: dict[str, torch.Tensor] = {}
        self._at_start = self._addresses()
        self._at_end: Addresses = ()

    def padded(self, requests: int) -> int:
        """Return the next power of two, so that JAX compiles few programs."""
        return min(next_power_of_two(requests), self._config.max_batch)

    def compilation(self) -> Compilation | None:
        """Return how many programs JAX compiled; what Triton compiles is not counted."""
        return Compilation(len(self._jax_steps), self._compile_s)

    def sharing(self) -> Sharing | None:
        """Return addresses, whose step each was, and what ran."""
        pair = check_versions()
        return Sharing(
            at_start=self._at_start,
            at_end=self._at_end,
            decoded_by=tuple(self._decoded_by),
            backends=self._backends,
            jax_plans=self._jax_plans,
            versions=f"torch {pair.torch} with jax {pair.jax}: {pair.status}",
        )

    def plan(self, bucket: int) -> Plan:
        """Return torch's plan of a padded batch; compile JAX's program and run it on a step that sees nothing."""
        plan = super().plan(bucket)
        if bucket not in self._jax_steps:
            model, tokens = self._config.model, bucket * self._config.model.query_len
            self._jax_plans[bucket] = swa_pallas.plan_for(
                jax.ShapeDtypeStruct((tokens, model.heads, model.k_dim), jnp.dtype(self._config.dtype)),
                self._session.arrays["cache"],
                jax.ShapeDtypeStruct((bucket, self._table.shape[1]), jnp.int32),
                window=model.window,
                query_len=model.query_len,
                max_requests=bucket,
                backend=self._backends["jax"],
            )
            self._jax_steps[bucket] = self._session.jax_step(self._decode_in_jax(bucket))
            self._seq_lens.zero_()
            start = time.perf_counter()
            self._jax_steps[bucket]()
            self._compile_s += time.perf_counter() - start
            for _ in range(jax_runner.WARM_UPS - 1):
                self._jax_steps[bucket]()
        return plan

    def step(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> Callable[[], StepTimes]:
        """Append with torch and decode with the framework whose turn it is; see `runner.Runner.step`."""
        turn = "jax" if len(self._decoded_by) % 2 else "torch"
        self._decoded_by.append(turn)
        self._stage(slot_mapping, seq_lens)
        self._outs.clear()
        return self._timed(lambda: self._decode_by(turn))

    def compare(self, requests: int) -> Difference:
        """Decode the last step by the other framework too, from the same bytes, and compare all live rows."""
        rows = requests * self._config.model.query_len
        return difference(*(to_numpy(out[:, :rows]) for out in self._decoded().values()))

    def finish(self) -> None:
        """Wait for both frameworks, and end the session."""
        super().finish()
        self._at_end = self._addresses()
        self._session.close()

    def _decoded(self) -> dict[str, torch.Tensor]:
        """Return the staged step's outputs by framework, the step's own first; the other one decodes it now."""
        for name in self._backends:
            if name not in self._outs:
                self._decode_by(name)
        return self._outs

    def _decode_by(self, name: str) -> None:
        if name == "jax":
            self._outs[name] = self._jax_steps[self._bucket]()
        else:
            self._decode_staged()
            self._outs.update(super()._decoded())

    def _decode_in_jax(self, bucket: int) -> Callable[[dict[str, Any]], jax.Array]:
        """Return the function of the registered buffers that decodes a padded batch."""
        tokens, plan = bucket * self._config.model.query_len, self._jax_plans[bucket]

        def decode(buffers: dict[str, Any]) -> jax.Array:
            def rows(name: str) -> tuple[jax.Array, ...]:
                return tuple(buffers[name][layer, :tokens] for layer in range(self._config.layers))

            outs = self._work.attend(
                buffers["cache"],
                rows("query"),
                rows("gate") if "gate" in buffers else None,
                buffers.get("sinks"),
                buffers["block_table"][:bucket],
                buffers["seq_lens"][:bucket],
                plan=plan,
            )
            return jnp.stack(outs)

        return decode

    def _addresses(self) -> Addresses:
        return tuple(self._session.pointers["cache"])
