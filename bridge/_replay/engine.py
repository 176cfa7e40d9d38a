"""The replay itself: a simulated clock, a queue, one decode step after another.

The clock advances by a nominal step time whatever the machine, so that a replay's batches, pages and lengths depend
on the trace and the seed alone and are the same on every backend.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bridge._replay.allocator import PagePool
from bridge._replay.batching import Batch, pages_per_request
from bridge._replay.checks import check_rows
from bridge._replay.crossing import Difference
from bridge._replay.result import CheckRecord, ReplayResult, StepRecord
from bridge._replay.runner import Runner, StepTimes
from bridge._replay.trace import Request
from swa_plan import CacheLayout, Plan, Problem
from swa_plan.models import ModelShape

DEFAULT_SCALES = {"int8": 4 / 127, "float8_e4m3fn": 1 / 64, "float8_e5m2": 1 / 64}
"""What a stored unit means: normal data fills int8 up to four sigma and stays far from fp8's ends."""


@dataclass(frozen=True)
class ReplayConfig:
    """What is replayed.

    Attributes:
        model: attention shape of one rank.
        layers: layers decoded a step; more than one needs a ``layers`` axis in ``layout``.
        layout: axis names of the cache.
        block: tokens in a page.
        dtype: dtype of queries.
        cache_dtype: dtype of the cache; None means ``dtype``.
        k_scale: scale of stored keys where the cache is quantised; None takes one that suits the dtype.
        v_scale: likewise for values.
        max_batch: most requests that run at once.
        max_steps: steps after which the replay stops; None runs the trace to its end.
        step_ms: simulated duration of a step.
        speed: factor by which requests arrive faster than in the trace.
        check_every: steps from one checked step to the next; 0 checks nothing.
        check_requests: most requests compared in a checked step.
        poison: whether unused and freed pages are filled with NaN.
        seed: of the data, the accepted drafts and the samples that are checked.

    Raises:
        ValueError: a value is out of range, or layout, layers and dtypes do not go together.
    """

    model: ModelShape
    layers: int = 1
    layout: str = "pages kv_heads block (kv dim)"
    block: int = 64
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    max_batch: int = 16
    max_steps: int | None = None
    step_ms: float = 20.0
    speed: float = 1.0
    check_every: int = 10
    check_requests: int = 2
    poison: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "block", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("check_every", "check_requests", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, or None for the whole trace, got {self.max_steps}")
        for name in ("step_ms", "speed"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be greater than 0 and finite, got {getattr(self, name)}")
        layout = CacheLayout.parse(self.layout)
        if self.layers > 1 and not layout.has_layers:
            raise ValueError(f"layout must have a layers axis for layers={self.layers}, got {self.layout!r}")
        layout.shape(
            pages=1,
            block=self.block,
            kv_heads=self.model.kv_heads,
            k_dim=self.model.k_dim,
            v_dim=self.model.v_dim,
            layers=self.layers if layout.has_layers else None,
        )
        problem = self.problem(1)
        if not problem.quantised and (self.k_scale is not None or self.v_scale is not None):
            raise ValueError(f"k_scale and v_scale need a quantised cache_dtype, got {problem.cache_dtype!r}")

    @property
    def scales(self) -> dict[str, float]:
        """``k_scale`` and ``v_scale`` of a quantised cache; empty without one."""
        if self.cache_dtype in (None, self.dtype):
            return {}
        default = DEFAULT_SCALES[str(self.cache_dtype)]
        return {
            "k_scale": default if self.k_scale is None else self.k_scale,
            "v_scale": default if self.v_scale is None else self.v_scale,
        }

    def problem(self, max_blocks: int) -> Problem:
        """Return the largest step's shape."""
        model = self.model
        return Problem(
            self.max_batch,
            model.heads,
            model.kv_heads,
            model.k_dim,
            model.v_dim,
            model.window,
            self.block,
            max_blocks,
            query_len=model.query_len,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
        )


@dataclass(frozen=True)
class Geometry:
    """Sizes of the cache that serve a trace.

    Attributes:
        pages: pages of the pool: what a full batch needs at worst.
        max_blocks: columns of the block table: what the longest request needs.
        page_bytes: bytes of a page, all layers.
    """

    pages: int
    max_blocks: int
    page_bytes: int

    @classmethod
    def of(cls, requests: Sequence[Request], config: ReplayConfig) -> Geometry:
        """Return the sizes for a trace."""
        longest = max(request.total for request in requests) + config.model.query_len
        max_blocks = -(-longest // config.block)
        problem = config.problem(max_blocks)
        each = pages_per_request(config.model.window, config.model.query_len, config.block, max_blocks)
        return cls(config.max_batch * each, max_blocks, problem.key_bytes * config.block * config.layers)


class Engine:
    """Replays requests on a runner.

    ``steps()`` yields one record a step; ``result()`` tells the whole when it is over.
    """

    def __init__(self, requests: Sequence[Request], config: ReplayConfig, runner: Runner) -> None:
        self.config = config
        self.geometry = Geometry.of(requests, config)
        self.trace_requests = len(requests)
        self._runner = runner
        self._waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
        self._pool = PagePool(self.geometry.pages)
        self._batch = Batch(
            self._pool,
            max_batch=config.max_batch,
            max_blocks=self.geometry.max_blocks,
            block=config.block,
            window=config.model.window,
            query_len=config.model.query_len,
        )
        self._clock_s = 0.0
        self._plans: dict[int, Plan] = {}
        self._records: list[StepRecord] = []
        self._times: list[Callable[[], StepTimes]] = []
        self._checks: list[CheckRecord] = []
        self._differences: list[Difference] = []
        self._wall_s = 0.0
        # Separate streams, so that checking more or fewer rows changes nothing else.
        self._drafts, self._samples = (
            np.random.default_rng(stream) for stream in np.random.SeedSequence(config.seed).spawn(2)
        )

    @property
    def batch(self) -> Batch:
        """The running requests."""
        return self._batch

    def steps(self) -> Iterator[StepRecord]:
        """Run step after step until the trace is served or ``max_steps`` is reached."""
        while self._waiting or self._batch.running:
            if self.config.max_steps is not None and len(self._records) >= self.config.max_steps:
                return
            start = time.perf_counter()
            record = self._step()
            self._wall_s += time.perf_counter() - start
            yield record

    def result(self) -> ReplayResult:
        """Wait for the device and sum up."""
        start = time.perf_counter()
        self._runner.finish()
        steps = []
        for record, times in zip(self._records, self._times, strict=True):
            append_us, attention_us = times()
            steps.append(replace(record, append_us=append_us, attention_us=attention_us))
        self._wall_s += time.perf_counter() - start
        return ReplayResult(
            settings=self._settings(),
            backend=self._runner.backend,
            framework=self._runner.framework,
            device=self._runner.device,
            profile=self._runner.profile,
            clock=self._runner.clock,
            compilation=self._runner.compilation(),
            plans=dict(sorted(self._plans.items())),
            steps=tuple(steps),
            checks=tuple(self._checks),
            sharing=self._runner.sharing(),
            differences=tuple(self._differences),
            wall_s=self._wall_s,
            trace_requests=self.trace_requests,
            peak_pages=self._pool.peak,
            pool_pages=self._pool.pages,
            reused_pages=self._pool.reused,
            page_bytes=self.geometry.page_bytes,
        )

    def _step(self) -> StepRecord:
        config, batch = self.config, self._batch
        self._admit()
        batch.extend()
        self._upload_table()
        requests = len(batch.running)
        bucket = self._runner.padded(requests)
        if bucket not in self._plans:
            self._plans[bucket] = self._runner.plan(bucket)
        seq_lens = batch.seq_lens(bucket)
        slot_mapping = batch.slot_mapping(bucket)
        key_bytes = self.geometry.page_bytes // config.block
        bytes_read, bytes_full = batch.visible_keys() * key_bytes, batch.full_keys() * key_bytes
        pages, pages_full = self._pool.used, batch.full_pages()

        start = time.perf_counter()
        self._times.append(self._runner.step(slot_mapping, seq_lens))
        host_us = (time.perf_counter() - start) * 1e6
        found = self._runner.compare(requests)
        if found is not None:
            self._differences.append(found)
        if config.check_every and len(self._records) % config.check_every == 0:
            self._check(seq_lens)

        before = sum(entry.generated for entry in batch.running)
        accepted = self._drafts.integers(1, config.model.query_len + 1, size=requests)
        finished, freed = batch.accept(accepted)
        tokens = sum(entry.generated for entry in batch.running) + sum(r.generated for r in finished) - before
        if config.poison and freed:
            self._runner.poison(np.array(freed, np.int64))
        record = StepRecord(
            step=len(self._records),
            clock_s=self._clock_s,
            requests=requests,
            bucket=bucket,
            queued=self._queued(),
            finished=len(finished),
            tokens=tokens,
            longest=int(seq_lens.max()),
            bytes_read=bytes_read,
            bytes_full=bytes_full,
            pages=pages,
            pages_full=pages_full,
            host_us=host_us,
        )
        self._records.append(record)
        self._clock_s += config.step_ms / 1e3
        return record

    def _admit(self) -> None:
        """Let requests in, first come first served; an idle engine skips to the next arrival."""
        batch, waiting = self._batch, self._waiting
        if not batch.running:
            self._clock_s = max(self._clock_s, self._arrival_s(waiting[0]))
        while waiting and not batch.full and self._arrival_s(waiting[0]) <= self._clock_s:
            slots = batch.admit(waiting.popleft())
            if len(slots):
                self._runner.prefill(slots)

    def _arrival_s(self, request: Request) -> float:
        return request.arrival_s / self.config.speed

    def _queued(self) -> int:
        """Count the requests that have arrived and wait; they are in order of arrival."""
        count = 0
        for request in self._waiting:
            if self._arrival_s(request) > self._clock_s:
                break
            count += 1
        return count

    def _upload_table(self) -> None:
        dirty = self._batch.dirty_rows
        if dirty:
            rows = np.array(sorted(dirty), np.int64)
            self._runner.set_table(rows, self._batch.table[rows])
            dirty.clear()

    def _check(self, seq_lens: np.ndarray) -> None:
        """Compare a sample of the step's requests with float64, and look at its padding rows."""
        running, step = self._batch.running, len(self._records)
        count = min(self.config.check_requests, len(running))
        for row in self._samples.choice(len(running), size=count, replace=False):
            layer = int(self._samples.integers(self.config.layers))
            first_block, pages = self._batch.pages_of(row)
            seen = self._runner.rows_seen(int(row), pages, layer)
            self._checks += check_rows(
                seen,
                model=self.config.model,
                seq_len=int(seq_lens[row]),
                first_block=first_block,
                max_blocks=self.geometry.max_blocks,
                options=self._runner.options,
                step=step,
                request=running[row].request.number,
                layer=layer,
            )
        if not self._runner.padding_is_zero(len(running)):
            message = "rows of padding requests (seq_lens 0) are not all zero"
            inf = float("inf")
            self._checks.append(CheckRecord(step, -1, -1, "any", 0, inf, inf, 0.0, False, message))

    def _settings(self) -> dict[str, Any]:
        config, model = self.config, self.config.model
        return {
            "model": model.name,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "k_dim": model.k_dim,
            "v_dim": model.v_dim,
            "window": model.window,
            "query_len": model.query_len,
            "gate": model.gate,
            "sinks": model.sinks,
            "softcap": model.softcap,
            "layers": config.layers,
            "layout": config.layout,
            "block": config.block,
            "max_blocks": self.geometry.max_blocks,
            "dtype": config.dtype,
            "cache_dtype": config.cache_dtype or config.dtype,
            "max_batch": config.max_batch,
            "step_ms": config.step_ms,
            "speed": config.speed,
            "poison": config.poison,
            "seed": config.seed,
        }
