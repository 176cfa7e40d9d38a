"""The replay on JAX: compiled programs of fixed shapes, and a cache that each append takes and returns in place.

A step is two programs, because the two are timed apart: one appends in all layers and has the cache donated, the other
decodes in all layers. Everything is compiled ahead of time and run on steps that see nothing before it serves. Batches
are padded to powers of two, and what else varies from step to step (slots of a prefill, freed pages) to one size,
because XLA compiles for shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import swa_pallas
from bridge._replay.crossing import Difference, Sharing
from bridge._replay.engine import Geometry, ReplayConfig
from bridge._replay.jax_work import PREFILL_ROWS, Work, poison
from bridge._replay.runner import Compilation, RowsSeen, StepTimes
from swa_pallas._device import has_pallas_triton, local_profile
from swa_plan import CacheLayout, DeviceProfile, Plan
from swa_plan._shapes import next_power_of_two

BACKENDS = ("pallas_triton", "xla")

POISON_PAGES = 64
"""Pages that one call of the poison program fills."""

WARM_UPS = 2
"""Runs of a program before it serves: a GPU records its command buffers in the first ones."""


class Programs(NamedTuple):
    """The compiled programs of one padded batch."""

    draw: Callable[..., Any]
    append: Callable[..., Any]
    attend: Callable[..., Any]


def choose_backend() -> str:
    """Return the backend that serves this machine: ``pallas_triton`` with a CUDA device, else ``xla``.

    Raises:
        NotImplementedError: the GPU is too old for ``pallas_triton``; ``xla`` has to be asked for.
    """
    on_cuda = jax.default_backend() == "gpu" and has_pallas_triton() and local_profile() is not None
    return "pallas_triton" if on_cuda else "xla"


class JaxRunner:
    """A `runner.Runner` on ``swa_pallas``.

    Args:
        config: what is replayed.
        geometry: sizes of the cache.
        backend: ``pallas_triton`` or ``xla``; the latter runs on JAX's default device.

    Raises:
        ValueError: no such backend, or there is no device for it.
        NotImplementedError: the GPU is too old for ``pallas_triton``.
    """

    clock = "host clock around one call each, until its result is ready (JAX's dispatch included)"

    def __init__(self, config: ReplayConfig, geometry: Geometry, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.backend = backend
        self.framework = f"jax {jax.__version__}"
        self.profile = _profile(backend)
        device = jax.local_devices()[0]
        self.device = (
            f"{device.device_kind}, sm_{self.profile.capability}" if self.profile else f"JAX {device.platform}"
        )
        self._config = config
        self._layout = CacheLayout.parse(config.layout)
        self._work = Work(config, backend)
        self.options: dict[str, Any] = dict(config.scales)
        self._random = jax.random.key(config.seed)
        self._sinks = None
        if config.model.sinks:
            self._random, own = jax.random.split(self._random)
            self._sinks = jax.random.normal(own, (config.model.heads,), jnp.float32)
            self.options["sinks"] = np.asarray(self._sinks)
        self._cache = self._make_cache(geometry)
        self._table = np.full((config.max_batch, geometry.max_blocks), -1, np.int32)
        self._most_pages = geometry.pages // config.max_batch
        self._plans: dict[int, Plan] = {}
        self._compiled = Compilation(0, 0.0)
        self._programs: dict[int, Programs] = {}
        self._make_programs()

    def padded(self, requests: int) -> int:
        """Return the next power of two, so that few programs are compiled."""
        return min(next_power_of_two(requests), self._config.max_batch)

    def compilation(self) -> Compilation | None:
        """Return how many programs were compiled ahead of time, those that draw data and look at pages included."""
        return self._compiled

    def sharing(self) -> Sharing | None:
        """Return None: JAX works alone."""
        return None

    def compare(self, requests: int) -> Difference | None:
        """Return None: there is no other way."""
        return None

    def plan(self, bucket: int) -> Plan:
        """Return the plan of a padded batch; compile its programs and run them on a step that sees nothing."""
        if bucket not in self._plans:
            model, tokens = self._config.model, bucket * self._config.model.query_len
            self._plans[bucket] = swa_pallas.plan_for(
                jax.ShapeDtypeStruct((tokens, model.heads, model.k_dim), jnp.dtype(self._config.dtype)),
                self._cache,
                jax.ShapeDtypeStruct((bucket, self._table.shape[1]), jnp.int32),
                window=model.window,
                query_len=model.query_len,
                max_requests=bucket,
                backend=self.backend,
            )
            self._compile_bucket(bucket)
        return self._plans[bucket]

    def set_table(self, rows: np.ndarray, entries: np.ndarray) -> None:
        """Overwrite rows of the block table; the next step uploads them."""
        self._table[rows] = entries

    def prefill(self, slots: np.ndarray) -> None:
        """Append random keys and values at ``slots``, in every layer."""
        for part in _parts(slots.astype(np.int32), PREFILL_ROWS, -1):
            self._random, self._cache = self._fill(self._random, self._cache, part)

    def poison(self, pages: np.ndarray) -> None:
        """Fill pages with NaN, in every layer."""
        for part in _parts(pages.astype(np.int32), POISON_PAGES, self._cache.pages):
            self._cache = self._spoil(self._cache, part)

    def step(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> Callable[[], StepTimes]:
        """Append and decode; see `runner.Runner.step`. Waits for both."""
        times = self._run(slot_mapping, seq_lens)
        return lambda: times

    def rows_seen(self, row: int, pages: np.ndarray, layer: int) -> RowsSeen:
        """Copy one request's share of the last step to the host."""
        model = self._config.model
        rows = slice(row * model.query_len, (row + 1) * model.query_len)
        index = np.zeros(self._most_pages, np.int32)
        index[: len(pages)] = pages
        bases = [np.asarray(base) for base in self._look(self._cache, index, np.int32(layer))]
        views = self._layout.views(bases, k_dim=model.k_dim, v_dim=model.v_dim, layer=self._layer(0))
        key_cache, value_cache = (view[: len(pages)] for view in views)
        seen = self._rows
        return RowsSeen(
            query=np.asarray(seen.query[layer])[rows],
            gate=None if seen.gate is None else np.asarray(seen.gate[layer])[rows],
            key=np.asarray(seen.key[layer])[rows],
            value=np.asarray(seen.value[layer])[rows],
            key_cache=key_cache,
            value_cache=value_cache,
            outs={"jax": np.asarray(self._out[layer])[rows]},
        )

    def padding_is_zero(self, requests: int) -> bool:
        """Tell whether the last step's padding rows are zero in every layer."""
        first = requests * self._config.model.query_len
        return not any((np.asarray(out)[first:] != 0).any() for out in self._out)

    def finish(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self._cache)

    def _run(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> StepTimes:
        bucket = len(seq_lens)
        draw, append, attend = self._programs[bucket]
        self._random, self._rows = draw(self._random)
        # Copies, because on a CPU the device may keep the host's memory, and the table changes.
        table, lengths, slots = jax.device_put((self._table[:bucket].copy(), seq_lens.copy(), slot_mapping.copy()))
        jax.block_until_ready((self._cache, self._rows, table, lengths, slots))
        start = time.perf_counter()
        self._cache = jax.block_until_ready(append(self._cache, self._rows.key, self._rows.value, slots))
        middle = time.perf_counter()
        self._out = jax.block_until_ready(
            attend(self._cache, self._rows.query, self._rows.gate, self._sinks, table, lengths)
        )
        return (middle - start) * 1e6, (time.perf_counter() - middle) * 1e6

    def _compile_bucket(self, bucket: int) -> None:
        tokens = bucket * self._config.model.query_len
        draw = self._compile(lambda key: self._work.draw(key, tokens), self._random)
        rows = draw(self._random)[1]
        slots = jnp.full((tokens,), -1, jnp.int32)
        table, lengths = jnp.full((bucket, self._table.shape[1]), -1, jnp.int32), jnp.zeros((bucket,), jnp.int32)
        append = self._compile(self._work.append, self._cache, rows.key, rows.value, slots, donate=(0,))
        options = rows.query, rows.gate, self._sinks, table, lengths
        plan = self._plans[bucket]
        attend = self._compile(lambda *arrays: self._work.attend(*arrays, plan=plan), self._cache, *options)
        self._programs[bucket] = Programs(draw, append, attend)
        for _ in range(WARM_UPS):
            self._run(np.asarray(slots), np.asarray(lengths))

    def _make_programs(self) -> None:
        """Compile what every batch shares."""
        slots = jnp.full((PREFILL_ROWS,), -1, jnp.int32)
        freed, seen = (jnp.zeros((count,), jnp.int32) for count in (POISON_PAGES, self._most_pages))
        self._fill = self._compile(self._work.fill, self._random, self._cache, slots, donate=(1,))
        self._look = self._compile(self._work.look, self._cache, seen, jnp.int32(0))
        if self._config.poison:
            self._spoil = self._compile(self._work.spoil, self._cache, freed, donate=(0,))

    def _compile(self, function: Callable[..., Any], *arrays: Any, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Compile for arrays like these; the result takes no others, so that nothing compiles later."""
        start = time.perf_counter()
        program = jax.jit(function, donate_argnums=donate).lower(*arrays).compile()
        self._compiled = Compilation(self._compiled.programs + 1, self._compiled.time_s + time.perf_counter() - start)
        return program

    def _make_cache(self, geometry: Geometry) -> swa_pallas.PagedCache:
        config, model = self._config, self._config.model
        cache = swa_pallas.PagedCache.empty(
            self._layout,
            pages=geometry.pages,
            block=config.block,
            kv_heads=model.kv_heads,
            k_dim=model.k_dim,
            v_dim=model.v_dim,
            layers=config.layers if self._layout.has_layers else None,
            dtype=jnp.dtype(config.cache_dtype or config.dtype),
        )
        return jax.tree.map(lambda base: jnp.full_like(base, poison(base.dtype)), cache) if config.poison else cache

    def _layer(self, layer: int) -> int | None:
        return layer if self._layout.has_layers else None


def _profile(backend: str) -> DeviceProfile | None:
    """Return the profile of the GPU that JAX computes on, or None where it computes elsewhere.

    Raises:
        ValueError: ``pallas_triton`` has no CUDA device, or this JAX no longer has it.
        NotImplementedError: the GPU is too old for it.
    """
    if backend == "pallas_triton":
        if not has_pallas_triton():
            raise ValueError(
                f"backend 'pallas_triton' needs jax.experimental.pallas.triton, which jax {jax.__version__} does not "
                "have: use backend 'xla'"
            )
        profile = local_profile() if jax.default_backend() == "gpu" else None
        if profile is None:
            raise ValueError("backend 'pallas_triton' needs a CUDA device, and JAX computes on none")
        return profile
    try:
        return local_profile() if jax.default_backend() == "gpu" else None
    except NotImplementedError:  # an old GPU runs XLA's operations all the same
        return None


def _parts(values: np.ndarray, size: int, padding: int) -> list[np.ndarray]:
    """Cut an array into parts of one size; ``padding`` fills the last."""
    padded = np.full(-(-len(values) // size) * size, padding, np.int32)
    padded[: len(values)] = values
    return list(padded.reshape(-1, size))
