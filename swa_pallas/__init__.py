"""The JAX side of `swa-decode`: so far only the two planner functions that an engine imports by name.

The Pallas kernels, the XLA path and the rest of the JAX API are not part of this version. What is here needs
neither JAX nor PyTorch: both functions are plain Python and live in `swa_plan`.
"""

from swa_plan import swa_decode_plan as swa_decode_plan
from swa_plan import swa_decode_splits as swa_decode_splits
