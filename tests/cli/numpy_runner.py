"""A runner on the NumPy reference: the engine's tests need no framework, and its faults are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge._replay import Geometry, ReplayConfig
from bridge._replay.batching import bucket_size
from bridge._replay.runner import RowsSeen
from swa_plan import DeviceProfile, plan, reference


class NumpyRunner:
    backend = "numpy"
    framework = "NumPy"
    device = "CPU"
    profile = None
    clock = "made up"

    def __init__(self, config: ReplayConfig, geometry: Geometry, *, window_error: int = 0, lost_append: int = -1):
        model = config.model
        self.config, self.window = config, model.window + window_error
        self.lost_append = lost_append
        self.random = np.random.default_rng(config.seed)
        self.table = np.full((config.max_batch, geometry.max_blocks), -1, np.int32)
        shape = geometry.pages, config.block, model.kv_heads
        fill = np.nan if config.poison else 0.0
        self.key_cache = np.full((*shape, model.k_dim), fill, np.float32)
        self.value_cache = np.full((*shape, model.v_dim), fill, np.float32)
        self.options: dict[str, Any] = {}
        if model.sinks:
            self.options["sinks"] = self.draw(model.heads)
        self.steps = 0
        self.poisoned: list[int] = []
        self.plans: list[int] = []
        self.problem = config.problem(geometry.max_blocks)

    def draw(self, *shape):
        return self.random.standard_normal(shape, dtype=np.float32)

    def padded(self, requests):
        return bucket_size(requests, self.config.max_batch)

    def compilation(self):
        return None

    def sharing(self):
        return None

    def compare(self, requests):
        return None

    def plan(self, bucket):
        self.plans.append(bucket)
        return plan(self.problem, DeviceProfile.named("cpu"))

    def set_table(self, rows, entries):
        self.table[rows] = entries

    def append(self, key, value, slots):
        self.key_cache, self.value_cache = reference.append(self.key_cache, self.value_cache, key, value, slots)

    def prefill(self, slots):
        model = self.config.model
        self.append(
            self.draw(len(slots), model.kv_heads, model.k_dim),
            self.draw(len(slots), model.kv_heads, model.v_dim),
            slots,
        )

    def poison(self, pages):
        self.poisoned += pages.tolist()
        self.key_cache[pages] = np.nan
        self.value_cache[pages] = np.nan

    def step(self, slot_mapping, seq_lens):
        model, tokens = self.config.model, len(slot_mapping)
        self.query = self.draw(tokens, model.heads, model.k_dim)
        self.key = self.draw(tokens, model.kv_heads, model.k_dim)
        self.value = self.draw(tokens, model.kv_heads, model.v_dim)
        self.gate = self.draw(tokens, model.heads) if model.gate else None
        slots = slot_mapping.copy()
        if self.steps == self.lost_append:
            slots[:] = -1
        self.append(self.key, self.value, slots)
        self.out = reference.swa_decode(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table[: len(seq_lens)],
            seq_lens,
            window=self.window,
            query_len=model.query_len,
            gate=self.gate,
            softcap=model.softcap,
            **self.options,
        ).astype(np.float32)
        self.steps += 1
        return lambda: (1.0, 2.0)

    def rows_seen(self, row, pages, layer):
        rows = slice(row * self.config.model.query_len, (row + 1) * self.config.model.query_len)
        return RowsSeen(
            query=self.query[rows],
            gate=None if self.gate is None else self.gate[rows],
            key=self.key[rows],
            value=self.value[rows],
            key_cache=self.key_cache[pages],
            value_cache=self.value_cache[pages],
            outs={"numpy": self.out[rows]},
        )

    def padding_is_zero(self, requests):
        return not self.out[requests * self.config.model.query_len :].any()

    def finish(self):
        pass
