"""What a crossing costs on the host: one session step of a 48-layer model, its parts, and a fence of every tensor.

Times are host microseconds a call in loops that do not wait for the device, as a serving loop does not; medians of
loops short enough that no queue fills up. ``jit dispatch`` is the same jitted function called with arrays that are
JAX's already, ``dispatch and export`` waits for its launch too.

XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.bridge_cost [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

import swa_torch
from bridge import Session, to_jax
from bridge._fence import await_result

LAYERS = 48
LOOPS, CALLS = 40, 25
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def host_us(*calls: Callable[[], Any]) -> list[float]:
    """Return the median host time of each call; loops alternate, so that drift meets all alike."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(LOOPS):
        for call, times in zip(calls, samples, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                result = call()
            times.append((time.perf_counter() - start) * 1e6 / CALLS)
            jax.block_until_ready(result)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    return [statistics.median(times) for times in samples]


def caches(layers: int) -> list[swa_torch.PagedCache]:
    """Return small caches; their size costs the host nothing."""
    return [
        swa_torch.PagedCache.empty(
            "kv pages block kv_heads dim", pages=16, block=16, kv_heads=2, k_dim=64, device=DEVICE
        )
        for _ in range(layers)
    ]


def touch(buffers: dict[str, Any]) -> Any:
    """Use every buffer a little, as one small result."""
    return sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(buffers))


def touch_and_update(buffers: dict[str, Any]) -> Any:
    """Write one value into each cache in place."""
    caches = jax.tree.map(lambda base: base.at[0, 0, 0, 0, 0].set(1), buffers["caches"])
    return touch({**buffers, "caches": caches}), {"caches": caches}


def measure(name: str, buffers: dict[str, Any], *, update: bool) -> dict[str, Any]:
    """Return a session step's host time and its parts."""
    with Session(buffers, copy=DEVICE == "cpu") as session:
        step = session.jax_step(touch_and_update, updates=("caches",)) if update else session.jax_step(touch)
        step()
        stream = session._current_stream()
        ticket = session._ticket.punch(stream)

        def dispatch() -> Any:
            updated, results, _ = step._jitted(
                ticket, [buffer.arrays for buffer in step._updated], [buffer.arrays for buffer in step._read], (), {}
            )
            for buffer, arrays in zip(step._updated, updated, strict=True):
                buffer.arrays = arrays
            return results

        result = dispatch()
        whole, alone, launched, imported, exported = host_us(
            step,
            dispatch,
            lambda: await_result(dispatch(), stream),
            lambda: session._ticket.punch(stream),
            lambda: await_result(result, stream),
        )
    return {
        "case": name,
        "step": whole,
        "jit dispatch": alone,
        "import + export": whole - alone,
        "dispatch and export": launched,
        "import alone": imported,
        "export alone": exported,
    }


def naive(buffers: dict[str, Any]) -> dict[str, Any]:
    """Return the host time of importing every tensor on every step."""
    function = jax.jit(touch)

    def step() -> Any:
        return torch.from_dlpack(function({name: jax.tree.map(to_jax, tree) for name, tree in buffers.items()}))

    step()
    return {"case": "every tensor imported", "step": host_us(step)[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}, jax {jax.__version__} - host microseconds a step")
    small = {name: torch.zeros(64, dtype=torch.int32, device=DEVICE) for name in ("table", "seq_lens", "slots")} | {
        name: torch.zeros(64, device=DEVICE) for name in ("query", "key", "value")
    }
    one = swa_torch.PagedCache.empty(
        "layers pages kv block kv_heads dim", pages=16, block=16, kv_heads=2, k_dim=64, layers=LAYERS, device=DEVICE
    )
    rows = [
        measure(f"{LAYERS} caches, read", {"caches": caches(LAYERS), **small}, update=False),
        measure(f"{LAYERS} caches, updated in place", {"caches": caches(LAYERS), **small}, update=True),
        measure(f"one cache of {LAYERS} layers, read", {"caches": one, **small}, update=False),
        naive({"caches": caches(LAYERS), **small}),
        naive({"caches": one, **small}) | {"case": "every tensor imported, one cache"},
    ]
    for row in rows:
        print(
            "  ".join(f"{name} {value:.1f}" if isinstance(value, float) else f"{value}:" for name, value in row.items())
        )
    if arguments.json:
        versions = {"device": device, "torch": torch.__version__, "jax": jax.__version__}
        arguments.json.write_text(json.dumps({**versions, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
