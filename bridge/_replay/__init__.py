"""Replay of a request trace: continuous batching of decode steps on a paged sliding-window cache.

Everything here but `torch_runner`, `jax_runner`, `jax_work` and `crossed_runner` is plain Python and NumPy. `trace`
reads requests, `allocator` hands out pages, `batching` decides which request sits in which row and which pages it still
needs, `engine` runs one step after another, `checks` compares with float64, `crossing` one framework with the other,
`result` is what comes out. A framework takes part only as a `runner.Runner`.
"""

from bridge._replay.allocator import OutOfPagesError as OutOfPagesError
from bridge._replay.allocator import PagePool as PagePool
from bridge._replay.crossing import Sharing as Sharing
from bridge._replay.engine import Engine as Engine
from bridge._replay.engine import Geometry as Geometry
from bridge._replay.engine import ReplayConfig as ReplayConfig
from bridge._replay.result import CheckRecord as CheckRecord
from bridge._replay.result import ReplayResult as ReplayResult
from bridge._replay.result import StepRecord as StepRecord
from bridge._replay.runner import Compilation as Compilation
from bridge._replay.runner import Runner as Runner
from bridge._replay.trace import Request as Request
from bridge._replay.trace import TraceError as TraceError
from bridge._replay.trace import bundled_trace as bundled_trace
from bridge._replay.trace import read_trace as read_trace
