"""Named decode steps, each with the reason it exists, and the inputs they stand for.

Every implementation runs the same cases, so that "works" means one thing. ``make_inputs(case, poison=True)`` fills what
the contract forbids to read with NaN and absurd table entries and leaves the visible data as it was: results must not
change by a bit.
"""

from swa_plan.cases._case import Case as Case
from swa_plan.cases._case import Inputs as Inputs
from swa_plan.cases._make import make_inputs as make_inputs
from swa_plan.cases._named import CASES as CASES
from swa_plan.cases._named import by_name as by_name
from swa_plan.cases._random import random_case as random_case
