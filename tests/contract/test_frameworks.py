"""Triton and Pallas on one GPU, same inputs and same plan: equal bits almost everywhere, else within a stated bound.

They differ by what their compilers put in place of the same operation: the order in which a tensor core's products are
rescaled and added, ``log`` in two bases, ``tanh``, and the exponential of the gate.
"""

import numpy as np
import pytest

from swa_plan import cases
from swa_plan._dtypes import numpy_dtype
from tests.contract.backends import BACKENDS, inputs_for, plan_for, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not {"triton", "jax-pallas_triton"} <= set(BACKENDS), reason="needs PyTorch and JAX with one CUDA device"
    ),
]

EQUAL_SHARE = 0.98
"""Least share of outputs whose bits are equal (0.999 on an H200 over nine bf16 shapes, 0.986 with an fp8 cache)."""


def ulp_at_row_maximum(out):
    """Return one unit in the last place of the output's dtype at each row's largest magnitude."""
    largest = np.abs(out.astype(np.float64)).max(-1, keepdims=True)
    mantissa_bits = {"bfloat16": 7, "float16": 10, "float32": 23}[out.dtype.name]
    exponent = np.floor(np.log2(np.maximum(largest, np.finfo(np.float32).tiny)))
    return 2.0 ** (exponent - mantissa_bits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["window-edge", "verify-gate", "ragged", "sinks", "softcap", "fp8-e4m3", "step5-tp4"])
def test_triton_and_pallas_agree(name, splits):
    inputs = inputs_for(cases.by_name(name), "triton", seed=21)
    plan = plan_for(inputs, "triton", splits=splits)
    outs = [run(inputs, backend, plan=plan)[0] for backend in ("triton", "jax-pallas_triton")]
    assert outs[0].dtype == outs[1].dtype == numpy_dtype(inputs.out_dtype or outs[0].dtype)
    finite = [np.nan_to_num(out.astype(np.float64), nan=0.0) for out in outs]
    assert np.array_equal(np.isnan(outs[0].astype(np.float64)), np.isnan(outs[1].astype(np.float64)))
    equal = (finite[0] == finite[1]).mean()
    assert equal >= EQUAL_SHARE, equal
    # Two roundings may fall to either side of a midpoint: attention, and its product with the gate.
    allowed = ulp_at_row_maximum(np.nan_to_num(outs[0].astype(np.float64)).astype(outs[0].dtype)) * 2
    assert (np.abs(finite[0] - finite[1]) <= allowed).all()
