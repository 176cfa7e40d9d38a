"""Make the small request trace that is bundled with the package: ``python benchmarks/make_trace.py``.

The columns are those of the public Azure LLM inference traces, the data are not: every number comes from a generator
with a fixed seed. Prompt and generation lengths are log-normal, as production lengths roughly are (a median and a
long tail); arrivals are a Poisson process whose rate swells and ebbs once over the trace, so that the batch does too.
Lengths are kept short enough that a machine without a GPU decodes the whole trace in about half a minute.
"""

from __future__ import annotations

import csv
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

SEED = 20240517
REQUESTS = 200
START = datetime(2024, 1, 1, 12, 0, 0)
SECONDS = 10.0
CONTEXT = {"median": 900, "sigma": 1.1, "least": 4, "most": 8000}
GENERATED = {"median": 28, "sigma": 0.8, "least": 2, "most": 160}


def lengths(rng: np.random.Generator, *, median: float, sigma: float, least: int, most: int) -> np.ndarray:
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, REQUESTS)), least, most).astype(int)


def arrivals(rng: np.random.Generator) -> np.ndarray:
    """Order statistics of a density 1 - 0.8 cos(2 pi t), by rejection: a swelling Poisson process given its count."""
    times: list[float] = []
    while len(times) < REQUESTS:
        time, height = rng.uniform(), rng.uniform(0, 1.8)
        if height <= 1 - 0.8 * np.cos(2 * np.pi * time):
            times.append(time * SECONDS)
    return np.sort(times)


def main(path: Path) -> None:
    rng = np.random.default_rng(SEED)
    columns = arrivals(rng), lengths(rng, **CONTEXT), lengths(rng, **GENERATED)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for seconds, context, generated in zip(*columns, strict=True):
            # Seven fractional digits, as in the public traces.
            moment = START + timedelta(seconds=float(seconds))
            writer.writerow([f"{moment:%Y-%m-%d %H:%M:%S.%f}0", context, generated])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "bridge" / "_data" / "trace.csv")
