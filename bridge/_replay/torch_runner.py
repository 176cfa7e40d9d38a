"""The replay on PyTorch: one paged cache, static staging buffers, and on a GPU one CUDA graph pair a padded batch.

Appends of all layers run first and attention of all layers after them, because the two are timed apart; layers share
nothing but the block table, so the order does not matter. On a GPU both are graphs: launched one by one, small kernels
would measure the host. What a step decodes is drawn anew and uploaded outside the timed part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import swa_torch
from bridge._replay.batching import bucket_size
from bridge._replay.crossing import Difference, Sharing
from bridge._replay.engine import Geometry, ReplayConfig
from bridge._replay.runner import Compilation, RowsSeen, StepTimes
from swa_plan import CacheLayout, DeviceProfile, Plan
from swa_torch._device import BACKENDS, GPU_BACKENDS, device_profile, require_hopper

HEAD_START_CYCLES = 400_000
"""GPU clock cycles, about 0.2 ms, that a step waits while the host queues it.

In an engine the layers before keep the GPU busy. Without them, events would measure the host's launches: 33 us instead
of 4 for one append on an H200.
"""

POISON_BYTE = 0x7F
"""NaN in both fp8 formats and the largest int8."""


def choose_backend() -> str:
    """Return the backend that serves this machine: ``triton`` with a CUDA device, else ``cpu``."""
    return "triton" if torch.cuda.is_available() else "cpu"


class TorchRunner:
    """A `runner.Runner` on ``swa_torch``.

    Args:
        config: what is replayed.
        geometry: sizes of the cache.
        backend: ``triton``, ``gluon``, ``cpu`` or ``interpret``.

    Raises:
        ValueError: no such backend, or there is no device for it.
        NotImplementedError: the backend is not for that device or this Triton.
    """

    def __init__(self, config: ReplayConfig, geometry: Geometry, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend in GPU_BACKENDS and not torch.cuda.is_available():
            raise ValueError(f"backend {backend!r} needs a CUDA device, and torch sees none")
        self.backend = backend
        self.framework = f"torch {torch.__version__}"
        self._kernel_backend = backend
        self._config = config
        self._cuda = backend in GPU_BACKENDS
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._cuda else torch.device("cpu")
        if backend == "gluon":
            require_hopper(self._device)
        self.profile: DeviceProfile | None = None
        self.device = f"CPU, {torch.get_num_threads()} threads"
        self.clock = "CUDA events around graph replays" if self._cuda else "host clock"
        if self._cuda:
            self.profile = device_profile(self._device)
            self.device = f"{torch.cuda.get_device_name(self._device)}, sm_{self.profile.capability}"
        self._random = torch.Generator(self._device).manual_seed(config.seed)
        self._cache = self._make_cache(geometry)
        self._make_buffers(geometry)
        self._make_options()
        self._plans: dict[int, Plan] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        self._graph_pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._bucket = 0

    def padded(self, requests: int) -> int:
        """Return 1, 2, 4, 8 or a multiple of 8: one more graph pair costs little."""
        return bucket_size(requests, self._config.max_batch)

    def compilation(self) -> Compilation | None:
        """Return None: what Triton compiles is not counted."""
        return None

    def sharing(self) -> Sharing | None:
        """Return None: torch works alone."""
        return None

    def compare(self, requests: int) -> Difference | None:
        """Return None: there is no other way."""
        return None

    def plan(self, bucket: int) -> Plan:
        """Return the plan of a padded batch; on a GPU, compile and capture its graphs."""
        if bucket not in self._plans:
            model, tokens = self._config.model, bucket * self._config.model.query_len
            self._plans[bucket] = swa_torch.plan_for(
                self._query[0, :tokens],
                self._cache,
                self._table[:bucket],
                window=model.window,
                query_len=model.query_len,
                layer=self._layer(0),
                max_requests=bucket,
                backend=self._kernel_backend,
            )
            if self._cuda:
                self._capture(bucket)
        return self._plans[bucket]

    def set_table(self, rows: np.ndarray, entries: np.ndarray) -> None:
        """Overwrite rows of the block table on the device."""
        self._table[self._upload(rows)] = self._upload(entries)

    def prefill(self, slots: np.ndarray) -> None:
        """Append random keys and values at ``slots``, in every layer."""
        model, mapping = self._config.model, self._upload(slots)
        for layer in range(self._config.layers):
            key, value = (self._draw(len(slots), model.kv_heads, dim) for dim in (model.k_dim, model.v_dim))
            swa_torch.append(self._cache, key, value, mapping, layer=self._layer(layer), **self._scales)

    def poison(self, pages: np.ndarray) -> None:
        """Fill pages with NaN, in every layer."""
        index = self._upload(pages)
        for layer in range(self._config.layers):
            for view in self._cache.views(self._layer(layer)):
                if view.element_size() == 1:
                    view.view(torch.int8)[index] = POISON_BYTE
                else:
                    view[index] = float("nan")

    def step(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> Callable[[], StepTimes]:
        """Append and decode; see `runner.Runner.step`."""
        self._stage(slot_mapping, seq_lens)
        return self._timed(self._decode_staged)

    def rows_seen(self, row: int, pages: np.ndarray, layer: int) -> RowsSeen:
        """Copy one request's share of the last step to the host."""
        rows = slice(row * self._config.model.query_len, (row + 1) * self._config.model.query_len)
        index = self._upload(pages.astype(np.int64))
        key_cache, value_cache = (
            to_numpy(_bytes(view)[index].view(view.dtype)) for view in self._cache.views(self._layer(layer))
        )
        return RowsSeen(
            query=to_numpy(self._query[layer, rows]),
            gate=None if self._gate is None else to_numpy(self._gate[layer, rows]),
            key=to_numpy(self._key[layer, rows]),
            value=to_numpy(self._value[layer, rows]),
            key_cache=key_cache,
            value_cache=value_cache,
            outs={name: to_numpy(out[layer, rows]) for name, out in self._decoded().items()},
        )

    def padding_is_zero(self, requests: int) -> bool:
        """Tell whether the last step's padding rows are zero in every layer."""
        first = requests * self._config.model.query_len
        return not any(bool(out[:, first:].ne(0).any()) for out in self._decoded().values())

    def finish(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _stage(self, slot_mapping: np.ndarray, seq_lens: np.ndarray) -> None:
        """Draw a step's data and upload its slots and lengths."""
        bucket, tokens = len(seq_lens), len(slot_mapping)
        for buffer in (self._query, self._key, self._value, *([] if self._gate is None else [self._gate])):
            buffer[:, :tokens].normal_(generator=self._random)
        self._slots[:tokens] = self._upload(slot_mapping)
        self._seq_lens[:bucket] = self._upload(seq_lens)
        self._out[:, :tokens] = float("nan")  # every row has to be written
        self._bucket = bucket

    def _append_staged(self) -> None:
        if self._cuda:
            self._graphs[self._bucket][0].replay()
        else:
            self._append(self._bucket)

    def _decode_staged(self) -> None:
        if self._cuda:
            self._graphs[self._bucket][1].replay()
        else:
            self._attend(self._bucket)

    def _decoded(self) -> dict[str, torch.Tensor]:
        """Return what was decoded of the staged step, ``[layers, tokens, heads, v_dim]``, by framework."""
        return {"torch": self._out[:, : self._bucket * self._config.model.query_len]}

    def _append(self, bucket: int) -> None:
        tokens = bucket * self._config.model.query_len
        for layer in range(self._config.layers):
            swa_torch.append(
                self._cache,
                self._key[layer, :tokens],
                self._value[layer, :tokens],
                self._slots[:tokens],
                layer=self._layer(layer),
                **self._scales,
            )

    def _attend(self, bucket: int) -> None:
        model, tokens = self._config.model, bucket * self._config.model.query_len
        for layer in range(self._config.layers):
            swa_torch.swa_decode(
                self._query[layer, :tokens],
                self._cache,
                self._table[:bucket],
                self._seq_lens[:bucket],
                window=model.window,
                gate=None if self._gate is None else self._gate[layer, :tokens],
                sinks=self._sinks,
                softcap=model.softcap,
                query_len=model.query_len,
                layer=self._layer(layer),
                out=self._out[layer, :tokens],
                plan=self._plans[bucket],
                **self._scales,
            )

    def _timed(self, decode: Callable[[], None]) -> Callable[[], StepTimes]:
        """Append and decode the staged step; the result tells how long the two took."""
        if not self._cuda:
            start = time.perf_counter()
            self._append_staged()
            middle = time.perf_counter()
            decode()
            taken_us = (middle - start) * 1e6, (time.perf_counter() - middle) * 1e6
            return lambda: taken_us
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        self._append_staged()
        middle.record()
        decode()
        end.record()

        def times() -> StepTimes:
            end.synchronize()
            return start.elapsed_time(middle) * 1e3, middle.elapsed_time(end) * 1e3

        return times

    def _capture(self, bucket: int) -> None:
        """Compile on a step that writes and sees nothing, then capture; replays read the buffers' later contents."""
        self._slots.fill_(-1)
        self._seq_lens.zero_()
        parts = (self._append, self._attend)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for part in parts:
                part(bucket)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graphs = []
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile: JAX's do, where it shares the cache.
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                part(bucket)
            graphs.append(graph)
        self._graphs[bucket] = (graphs[0], graphs[1])

    def _make_cache(self, geometry: Geometry) -> swa_torch.PagedCache:
        config, model = self._config, self._config.model
        layout = CacheLayout.parse(config.layout)
        cache = swa_torch.PagedCache.empty(
            layout,
            pages=geometry.pages,
            block=config.block,
            kv_heads=model.kv_heads,
            k_dim=model.k_dim,
            v_dim=model.v_dim,
            layers=config.layers if layout.has_layers else None,
            dtype=getattr(torch, config.cache_dtype or config.dtype),
            device=self._device,
        )
        for base in cache.bases:
            if not config.poison:
                _bytes(base).zero_()
            elif base.element_size() == 1:
                _bytes(base).fill_(POISON_BYTE)
            else:
                base.fill_(float("nan"))
        return cache

    def _make_buffers(self, geometry: Geometry) -> None:
        """Allocate what a step reads and writes once, because a graph knows addresses."""
        config, model = self._config, self._config.model
        tokens = config.max_batch * model.query_len
        dtype = getattr(torch, config.dtype)

        def rows(*shape: int) -> torch.Tensor:
            return torch.zeros((config.layers, tokens, *shape), dtype=dtype, device=self._device)

        self._query = rows(model.heads, model.k_dim)
        self._key = rows(model.kv_heads, model.k_dim)
        self._value = rows(model.kv_heads, model.v_dim)
        self._gate = rows(model.heads) if model.gate else None
        self._out = rows(model.heads, model.v_dim)
        self._table = torch.full((config.max_batch, geometry.max_blocks), -1, dtype=torch.int32, device=self._device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int32, device=self._device)
        self._seq_lens = torch.zeros(config.max_batch, dtype=torch.int32, device=self._device)

    def _make_options(self) -> None:
        config, model = self._config, self._config.model
        self._sinks = None
        self._scales: dict[str, Any] = dict(config.scales)
        self.options: dict[str, Any] = dict(config.scales)
        if model.sinks:
            self._sinks = torch.randn(model.heads, generator=self._random, device=self._device)
            self.options["sinks"] = to_numpy(self._sinks)

    def _layer(self, layer: int) -> int | None:
        return layer if self._cache.layout.has_layers else None

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._query.dtype, device=self._device).normal_(generator=self._random)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor to the host, bit by bit; bfloat16 and fp8 become their ml_dtypes."""
    name = str(tensor.dtype).removeprefix("torch.")
    host = tensor.detach().contiguous().cpu()
    if not hasattr(ml_dtypes, name):
        return host.numpy().copy()
    return _bytes(host).numpy().copy().view(getattr(ml_dtypes, name))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of its size, because not every operation knows every float."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
