"""Ways through both frameworks: arrays of one, the kernel of the other, and the result back, nothing copied.

``torch>jax`` makes cache, table, lengths, query and all else as torch tensors, hands them to JAX with
``bridge.to_jax``, decodes there, and takes the result back with ``bridge.to_torch``. ``jax>torch`` is the reverse.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import torch

import bridge
from bridge.parity import _jax, _torch
from bridge.parity._backends import Result, crossed_kernel, to_result
from swa_plan.cases import Inputs


class Crossing(NamedTuple):
    """What a crossed step computes, and whether memory was shared.

    Attributes:
        result: the step's output and LSE.
        same_memory: whether each base of the cache, and each array beside it, has the same address in both frameworks.
    """

    result: Result
    same_memory: bool


def run_crossed(inputs: Inputs, way: str) -> Crossing:
    """Run a step one way.

    Raises:
        ValueError, TypeError, RuntimeError: what cannot cross, from ``bridge.to_jax`` or ``bridge.to_torch``.
    """
    if way == "torch>jax":
        reverse, source, there, target, back = "jax>torch", _torch, bridge.to_jax, _jax, bridge.to_torch
    else:
        reverse, source, there, target, back = "torch>jax", _jax, bridge.to_torch, _torch, bridge.to_jax
    # Each way's kernel runs where the other way's arrays are made.
    made_for, kernel = crossed_kernel(reverse), crossed_kernel(way)
    with _jax.scope(*vars(inputs).values()):
        (query, cache, block_table, seq_lens), options = source.arguments(inputs, made_for)
        crossed = {name: there(value) if _is_array(value) else value for name, value in options.items()}
        positional = [there(each) for each in (query, cache, block_table, seq_lens)]
        pairs = [(query, positional[0]), *zip(cache.bases, positional[1].bases, strict=True)]
        pairs += [(block_table, positional[2]), (seq_lens, positional[3])]
        pairs += [(value, crossed[name]) for name, value in options.items() if _is_array(value)]
        if inputs.out_dtype is not None:
            crossed["out_dtype"] = target.to_dtype(inputs.out_dtype)
        returned = target.api.swa_decode(*positional, backend=target.name_of(kernel), **crossed)
        result = to_result(returned, lambda array: source.to_numpy(back(array)))
        same_memory = all(
            source.address(ours) == target.address(theirs) for ours, theirs in pairs if ours.shape.count(0) == 0
        )
    return Crossing(result, same_memory)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, jax.Array))
