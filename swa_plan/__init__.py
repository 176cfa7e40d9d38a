"""The framework-free part of swa-decode: problem, cache layouts, planner, float64 reference, cases and tolerance rule.

Imports NumPy and ml_dtypes only; ``swa_torch`` and ``swa_pallas`` take every number of a decode step from here.
"""

from swa_plan import cases as cases
from swa_plan import models as models
from swa_plan import reference as reference
from swa_plan import tolerance as tolerance
from swa_plan._compat import swa_decode_plan as swa_decode_plan
from swa_plan._compat import swa_decode_splits as swa_decode_splits
from swa_plan._device import DeviceProfile as DeviceProfile
from swa_plan._layout import LAYOUTS as LAYOUTS
from swa_plan._layout import CacheLayout as CacheLayout
from swa_plan._plan import Plan as Plan
from swa_plan._plan import plan as plan
from swa_plan._predict import Prediction as Prediction
from swa_plan._predict import alternatives as alternatives
from swa_plan._predict import predict as predict
from swa_plan._problem import Problem as Problem
from swa_plan._version import __version__ as __version__
