"""Parity as a product: the same decode steps through every backend present, judged by the shipped tolerance rule.

Another project runs its own decode on the named cases with five lines in its suite::

    import pytest
    from bridge import parity
    from swa_torch import swa_decode as decode  # in place of it: yours

    @pytest.mark.parametrize("name", parity.case_names())
    def test_decode(name):
        inputs = parity.inputs(name)
        arguments, options = parity.arguments(inputs, "cpu")
        parity.assert_close(decode(*arguments, **options), inputs)

and this project's backends, in its own environment, with ``parity.check(case, backend)``. ``swa check`` is the same
from a terminal. Importing this package imports neither framework: each is imported by the first call that needs it.
Names without an underscore are public.
"""

from bridge.parity._backends import Result as Result
from bridge.parity._backends import absent as absent
from bridge.parity._backends import arguments as arguments
from bridge.parity._backends import backends as backends
from bridge.parity._backends import run as run
from bridge.parity._cases import BRIEF as BRIEF
from bridge.parity._cases import CASES as CASES
from bridge.parity._cases import Case as Case
from bridge.parity._cases import case_names as case_names
from bridge.parity._cases import inputs as inputs
from bridge.parity._cases import random_cases as random_cases
from bridge.parity._check import Outcome as Outcome
from bridge.parity._check import check as check
from bridge.parity._judge import assert_close as assert_close
from bridge.parity._judge import compare as compare
from bridge.parity._judge import same_bits as same_bits
from bridge.parity._judge import to_numpy as to_numpy
