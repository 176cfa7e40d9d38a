"""Sliding-window grouped-query decode attention for JAX, over a paged KV cache.

Pure functions of arrays, for use under ``jax.jit``. On CUDA the kernels are Pallas lowered through Triton; elsewhere
plain XLA operations serve. Works without a GPU and never imports PyTorch.
"""

from swa_pallas._api import swa_decode as swa_decode
from swa_pallas._api import swa_decode_gated as swa_decode_gated
from swa_pallas._append import append as append
from swa_pallas._cache import PagedCache as PagedCache
from swa_pallas._cache import cache_specs as cache_specs
from swa_pallas._inputs import check_inputs as check_inputs
from swa_pallas._merge import merge_states as merge_states
from swa_pallas._planning import plan_for as plan_for
from swa_pallas._warmup import warmup as warmup
from swa_plan import Plan as Plan
from swa_plan import swa_decode_plan as swa_decode_plan
from swa_plan import swa_decode_splits as swa_decode_splits
