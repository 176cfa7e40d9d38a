"""What the tests of the replay's runners have in common: small replays, and what compiled while they ran."""

import json

from typer.testing import CliRunner

from bridge._cli._app import app
from bridge._replay import Request
from swa_plan.models import ModelShape

SMALL = ["--model", "custom", "--heads", "4", "--kv-heads", "2", "--k-dim", "32", "--window", "40", "--block", "16"]
TINY = ModelShape("tiny", 4, 2, 16, 16, 20, query_len=2, gate=True)
REQUESTS = [Request(number, 0.02 * number, 5 + 9 * number, 9) for number in range(8)]


def swa(*arguments):
    """Run `swa replay`."""
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)


def report_of(*arguments):
    """Return the JSON report of a replay that must succeed."""
    result = swa(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def compiled_by_jax(engine):
    """Run an engine; return its padded batches, and what JAX compiled in steps whose padded batch it had seen."""
    import jax

    compiled, buckets, late = [], set(), []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    for record in engine.steps():
        during = [name for name in compiled if "backend_compile" in name]
        if record.bucket in buckets:
            late += during
        else:
            assert during, "JAX no longer reports compilations by this name"
        buckets.add(record.bucket)
        compiled.clear()
    return buckets, late
