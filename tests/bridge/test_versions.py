"""Which versions of torch and JAX the bridge takes, and what it says of others."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

from bridge import Session, _versions  # noqa: E402
from bridge._versions import Pair, check_order_tested, pair_of  # noqa: E402
from tests.bridge.test_session import total  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device that torch and JAX see")


@pytest.fixture(autouse=True)
def _tested(monkeypatch):
    """What was tested changes with each release."""
    monkeypatch.setattr(_versions, "ORDER_TESTED", (("2.11", "0.11"),))
    monkeypatch.setattr(_versions, "VALUES_TESTED", (("2.11", "0.11"), ("2.13", "0.10")))


@pytest.mark.parametrize(
    "torch_version, jax_version, status",
    [
        ("2.11.0+cu130", "0.11.2", "order tested"),
        ("2.11.1", "0.11.0", "order tested"),
        ("2.13.0+cpu", "0.10.2", "values tested"),
        ("2.12.0", "0.11.2", "untested"),
        ("2.11.0", "0.110.2", "untested"),
        ("3.0", "1.0", "untested"),
        ("2.20.0.dev20260101", "0.11.2", "untested"),
    ],
)
def test_what_is_known_of_a_pair_of_versions(torch_version, jax_version, status):
    assert pair_of(torch_version, jax_version) == Pair(torch_version, jax_version, status)


@pytest.mark.parametrize(
    "torch_version, jax_version, words",
    [
        ("2.9.1", "0.11.2", "torch must be at least 2.11 for the bridge, got 2.9.1"),
        ("1.13", "0.11.2", "torch must be at least 2.11 for the bridge, got 1.13"),
        ("2.11.0", "0.10.1", "jax must be at least 0.10.2 for the bridge, got 0.10.1"),
        ("2.11.0", "0.9.12", "jax must be at least 0.10.2 for the bridge, got 0.9.12"),
    ],
)
def test_old_versions_are_refused(torch_version, jax_version, words):
    with pytest.raises(NotImplementedError, match=words):
        pair_of(torch_version, jax_version)


@pytest.mark.parametrize("status", ["values tested", "untested"])
def test_an_order_that_was_not_tested_is_refused_with_the_way_out(monkeypatch, x, status):
    monkeypatch.setattr(_versions, "check_versions", lambda: Pair("2.19.0", "0.19.0", status))
    with pytest.raises(RuntimeError, match=r"got torch 2\.19\.0 with jax 0\.19\.0: install those, or run the race"):
        check_order_tested(False)
    check_order_tested(True)
    Session({"x": x}).close()  # on the CPU nothing runs late


def test_a_tested_order_needs_nothing(monkeypatch):
    monkeypatch.setattr(_versions, "check_versions", lambda: Pair("2.11.0", "0.11.2", "order tested"))
    check_order_tested(False)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_gpus_session_wants_tested_versions(monkeypatch):
    monkeypatch.setattr(_versions, "check_versions", lambda: Pair("2.19.0", "0.19.0", "untested"))
    x = torch.ones(64, device="cuda")
    with pytest.raises(RuntimeError, match="pass allow_untested=True"):
        Session({"x": x})
    with Session({"x": x}, allow_untested=True) as session:
        assert session.jax_step(total)().item() == 64


@pytest.mark.parametrize(
    "triton, numpy, fails",
    [
        ("3.6.0", "2.4.1", True),
        ("3.8.1", "2.10", True),
        ("3.6.0", "2.3.9", False),
        ("3.9.0", "2.6", False),
        (None, "2.6", False),
    ],
)
def test_tritons_interpreter_with_newer_numpy(triton, numpy, fails):
    fault = _versions.interpreter_fault(triton, numpy)
    assert (fault is not None) == fails
    assert fault is None or "it needs triton>=3.9 or numpy<2.4" in fault


def test_old_versions_have_no_session_on_a_cpu_either(monkeypatch):
    def refuse():
        raise NotImplementedError("torch must be at least 2.11 for the bridge, got 2.9")

    monkeypatch.setattr("bridge._session.check_versions", refuse)
    with pytest.raises(NotImplementedError, match="torch must be at least"):
        Session({"x": torch.ones(4)})
