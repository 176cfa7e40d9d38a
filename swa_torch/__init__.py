"""Sliding-window grouped-query decode attention for PyTorch, over a paged KV cache.

Works without Triton and without a GPU (plain torch operations); on CUDA the kernels are Triton's.
"""

from swa_plan import Plan as Plan
from swa_plan import swa_decode_plan as swa_decode_plan
from swa_plan import swa_decode_splits as swa_decode_splits
from swa_torch._api import swa_decode as swa_decode
from swa_torch._api import swa_decode_gated as swa_decode_gated
from swa_torch._append import append as append
from swa_torch._cache import PagedCache as PagedCache
from swa_torch._inputs import check_inputs as check_inputs
from swa_torch._merge import merge_states as merge_states
from swa_torch._planning import plan_for as plan_for
from swa_torch._warmup import warmup as warmup
