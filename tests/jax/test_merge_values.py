"""merge_states in numbers that can be checked by hand: known values, identities, and shards of one attention."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from swa_pallas import merge_states, swa_decode
from swa_plan import cases, tolerance
from tests.contract.jax_runner import arguments
from tests.jax.helpers import BACKENDS, make_step, normal, same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

EPS = 2.0**-23
LN_2, LN_8 = np.log([2.0, 8.0])


def states_of(lses, values, v_dim=16):
    """Return one token and head: parts with these LSEs, every number of an output being the part's value."""
    outs = np.repeat(np.array(values, np.float32), v_dim).reshape(-1, 1, 1, v_dim)
    return jnp.asarray(outs), jnp.asarray(np.array(lses, np.float32).reshape(-1, 1, 1))


KNOWN = {
    # name: (LSEs, values, sink, gate, expected value, expected LSE)
    "weights-2-and-8": ([LN_2, LN_8], [0.0, 10.0], None, None, 8.0, np.log(10.0)),
    "swapped": ([LN_8, LN_2], [0.0, 10.0], None, None, 2.0, np.log(10.0)),
    "three-alike": ([1.0, 1.0, 1.0], [3.0, 6.0, 9.0], None, None, 6.0, 1 + np.log(3.0)),
    "sink-takes-its-share": ([LN_2, LN_8], [0.0, 10.0], np.log(6.0), None, 5.0, np.log(16.0)),
    "gate-halves": ([LN_2, LN_8], [0.0, 10.0], None, 0.0, 4.0, np.log(10.0)),
    "gate-does-not-reach-the-lse": ([LN_2, LN_8], [0.0, 10.0], np.log(6.0), 0.0, 2.5, np.log(16.0)),
    "one-part": ([2.5], [7.0], None, None, 7.0, 2.5),
    "identity": ([-np.inf, 2.5], [5.0, 7.0], None, None, 7.0, 2.5),
    "seventeen": ([0.0] * 17, [*range(17)], None, None, 8.0, np.log(17.0)),
    "sink-above-all": ([0.0, 0.0], [1.0, 1.0], 200.0, None, 0.0, 200.0),
    "large": ([1e30, 1e30], [3.0, 5.0], None, None, 4.0, 1e30),
    "large-negative": ([-1e10, -1e10], [3.0, 5.0], None, None, 4.0, -1e10),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name, backend):
    lses, values, sink, gate, expected, expected_lse = KNOWN[name]
    options = {
        "sinks": None if sink is None else jnp.full((1,), sink, jnp.float32),
        "gate": None if gate is None else jnp.full((1, 1), gate, jnp.float32),
    }
    out, lse = merge_states(*states_of(lses, values), backend=backend, **options)
    np.testing.assert_allclose(np.asarray(out), np.full((1, 1, 16), expected), rtol=8 * EPS, atol=1e-30)
    np.testing.assert_allclose(np.asarray(lse), [[expected_lse]], rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
def test_a_part_that_saw_nothing_changes_no_bit_in_the_loop(garbage, backend):
    outs, lses = normal(17, 3, 4, 32), 3 * normal(17, 3, 4, seed=1)
    sinks = normal(4, seed=5)
    expected = merge_states(outs, lses, sinks=sinks, backend=backend)
    for place in (0, 1, 17):
        more_outs = jnp.concatenate([outs[:place], jnp.full_like(outs[:1], garbage), outs[place:]])
        more_lses = jnp.concatenate([lses[:place], jnp.full_like(lses[:1], -jnp.inf), lses[place:]])
        assert same_bits(merge_states(more_outs, more_lses, sinks=sinks, backend=backend), expected), place


@pytest.mark.parametrize("name", ["sinks-short", "ragged", "verify-gate"])
def test_merged_shards_are_the_whole(name, backend):
    inputs = cases.make_inputs(cases.by_name(name), seed=8, dtype="float32")
    positional, options = arguments(inputs, f"jax-{backend}")
    sinks, gate = options.pop("sinks", None), options.pop("gate", None)
    options.update(return_lse=True, out_dtype="float32", backend=backend)
    shards = []
    for edges in pairwise((-(2**31), 0, 5, 200, 2**31 - 1)):
        start, end = (jnp.full(positional[3].shape, edge, jnp.int32) for edge in edges)
        shards.append(swa_decode(*positional, **options, kv_start=start, kv_end=end))
    outs, lses = (jnp.stack(each) for each in zip(*shards, strict=True))
    out, lse = merge_states(outs, lses, sinks=sinks, gate=gate, backend=backend)
    tolerance.assert_close(np.asarray(out), inputs, out_dtype="float32", actual_lse=np.asarray(lse))


def test_a_shared_prefix_is_attended_once(backend):
    """A cascade: the prefix through one table row for all, the rest through each request's own."""
    step = make_step((40, 47, 33))
    step = step._replace(block_table=step.block_table.at[:, 0].set(step.block_table[0, 0]))
    options = {"window": None, "return_lse": True, "backend": backend}
    edge = jnp.full((3,), 16, jnp.int32)
    whole = swa_decode(*step, **options)
    prefix = swa_decode(
        step.query, step.cache, step.block_table[:1], edge[:1] + 2, kv_end=edge[:1], query_len=3, **options
    )
    rest = swa_decode(*step, **options, kv_start=edge)
    outs, lses = (jnp.stack(each) for each in zip(prefix, rest, strict=True))
    for actual, expected in zip(merge_states(outs, lses, backend=backend), whole, strict=True):
        assert jnp.abs(actual - expected).max() <= 16 * EPS * jnp.abs(expected).max()
