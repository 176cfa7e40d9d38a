"""A GPU that is not there: its device, and times that planted costs would give."""

from contextlib import contextmanager
from dataclasses import astuple, replace

import numpy as np

from bridge._tune.device import Device
from bridge._tune.sample import Timed
from swa_plan import predict
from swa_plan._costs import COST_NAMES, Costs

H200 = Device("NVIDIA H200", 90, 132, memory_gbps=4814, l2_bytes=60 << 20)
A100 = Device("NVIDIA A100-SXM4-80GB", 80, 108)


def planted(seed, device=H200, spread=1.5):
    """Costs of another chip: each the shipped one times a factor of its own."""
    factors = np.random.default_rng(seed).uniform(1 / spread, spread, len(COST_NAMES))
    return Costs(*(cost * factor for cost, factor in zip(astuple(device.shipped.costs), factors, strict=True)))


class FakeBench:
    """Times plans by ``costs``, with noise; keeps what it was asked to compile."""

    def __init__(self, device, costs, *, noise=0.03, seed=0):
        self.profile = replace(device.shipped, costs=costs)
        self.noise, self.random = noise, np.random.default_rng(seed)
        self.compiled = []

    def compile(self, plans):
        self.compiled += plans
        return len(plans)

    def each(self, plans, advance):
        return [Timed(plan, self.time_us(plan, self.noise)) for plan in plans if advance() is None]

    def together(self, plans, advance):
        return [Timed(plan, self.time_us(plan, 0)) for plan in plans if advance() is None]

    def time_us(self, plan, noise):
        return predict(plan, self.profile).time_us * float(np.exp(noise * self.random.standard_normal()))


@contextmanager
def quiet(name, steps):
    yield lambda: None
