"""`Session` on the CPU: what it registers, and what its steps take, give and refuse.

Order and lifetimes on a GPU are in test_races.py and test_lifetimes.py.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import Session, _session, to_jax  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")

LAYOUT = "pages kv block kv_heads dim"


def total(buffers):
    return buffers["x"].sum()


def grown(buffers):
    """Return a step's outcome: one more everywhere."""
    return None, {"x": buffers["x"] + 1}


def assert_shared(session):
    pairs = [pair for pairs in session.pointers.values() for pair in pairs]
    assert pairs
    assert all(ours == theirs for ours, theirs in pairs)


# Registration


def test_trees_of_both_owners_keep_their_structure_and_memory():
    tensor, array = torch.ones(4), jnp.full(4, 2.0)
    with Session({"tree": {"mine": [tensor], "theirs": (array, torch.zeros(2))}, "one": torch.zeros(3)}) as session:
        tree = session.tensors["tree"]
        assert tree["mine"][0] is tensor
        assert isinstance(tree["theirs"], tuple)
        assert tree["theirs"][0].data_ptr() == array.unsafe_buffer_pointer()
        assert tree["theirs"][0].tolist() == [2.0] * 4
        assert jax.tree.structure(session.arrays["tree"]) == jax.tree.structure(tree)
        assert session.device == torch.device("cpu")
        assert repr(session) == "Session(tree, one; cpu)"
        assert len(session.pointers["tree"]) == 3
        assert_shared(session)


@pytest.mark.parametrize("owner", ["torch", "jax"])
def test_a_cache_is_each_frameworks_own(owner):
    package = swa_torch if owner == "torch" else swa_pallas
    cache = package.PagedCache.empty("pages block kv_heads (kv dim)", pages=2, block=4, kv_heads=1, k_dim=32, v_dim=16)
    with Session({"cache": cache}) as session:
        ours, theirs = session.tensors["cache"], session.arrays["cache"]
        assert isinstance(ours, swa_torch.PagedCache)
        assert isinstance(theirs, swa_pallas.PagedCache)
        assert ours.layout == theirs.layout == cache.layout
        assert (ours.k_dim, ours.v_dim, theirs.k_dim, theirs.v_dim) == (32, 16, 32, 16)
        seen = session.jax_step(lambda buffers: jnp.float32(buffers["cache"].v_dim))()
        assert seen.item() == 16
        assert_shared(session)


def test_what_jax_hands_over_stays_its_memory():
    array = jnp.arange(4.0)
    pointer = array.unsafe_buffer_pointer()
    with Session({"x": array}) as session:
        del array
        session.tensors["x"].add_(1)
        assert session.pointers["x"] == [(pointer, pointer)]
        assert session.jax_step(total)().item() == 10


def overlapping():
    base = torch.zeros(64)
    return {"a": base[:32], "b": base[16:48]}


def twice():
    tensor = torch.zeros(4)
    return {"a": tensor, "b": [tensor.view(2, 2)]}


def in_both_frameworks():
    tensor = torch.zeros(4)
    return {"a": tensor, "b": to_jax(tensor)}


@pytest.mark.parametrize("buffers", [overlapping, twice, in_both_frameworks])
def test_overlapping_buffers_are_refused(buffers):
    with pytest.raises(ValueError, match="buffers must not share memory with each other, got 'a' and 'b'"):
        Session(buffers())


def test_neighbours_in_one_tensor_do_not_overlap():
    base = torch.arange(32.0)
    with Session({"a": base[:16], "b": base[16:], "nothing": base[16:16]}) as session:
        assert session.jax_step(lambda buffers: buffers["b"].sum() - buffers["a"].sum())().item() == 256


@pytest.mark.parametrize(
    "buffers, error, words",
    [
        (lambda: [torch.zeros(4)], TypeError, "buffers must map names to tensors, arrays or caches, got list"),
        (lambda: {1: torch.zeros(4)}, TypeError, "buffers must have strings for names, got 1"),
        (dict, ValueError, "buffers must be on one device .* got no arrays"),
        (lambda: {"a": []}, ValueError, r"buffers\['a'\] must hold at least one tensor or array, got \[\]"),
        (lambda: {"a": None}, ValueError, r"buffers\['a'\] must hold at least one .* got None"),
        (lambda: {"a": 3}, TypeError, r"buffers\['a'\] must hold tensors, arrays and PagedCaches only, got int"),
        (lambda: {"a": np.zeros(4)}, TypeError, r"buffers\['a'\] must hold .* got ndarray"),
        (lambda: {"a": torch.zeros(8)[::2]}, ValueError, r"buffers\['a'\] must be contiguous"),
        (lambda: {"a": torch.zeros(4, dtype=torch.int64)}, TypeError, r"buffers\['a'\] must not be int64"),
        (lambda: {"a": torch.zeros(4, device="meta")}, ValueError, r"buffers\['a'\] must be on the CPU or a CUDA"),
        (lambda: {"a": {"b": torch.zeros(4, requires_grad=True)}}, ValueError, r"buffers\['a'\] must not require grad"),
    ],
)
def test_buffers_that_cannot_be_registered(buffers, error, words):
    with pytest.raises(error, match=words):
        Session(buffers())


def test_buffers_on_several_devices_are_refused(monkeypatch, x):
    registered = {
        "a": SimpleNamespace(tensors=[x]),
        "b": SimpleNamespace(tensors=[torch.zeros(4, device="meta")]),
    }
    monkeypatch.setattr(_session, "register", lambda buffers: registered)
    with pytest.raises(ValueError, match=r"one session a device, with that device's shards.*got cpu, meta"):
        Session({})


def test_arrays_and_tensors_cannot_be_replaced(session):
    for mapping in (session.tensors, session.arrays):
        with pytest.raises(TypeError):
            mapping["x"] = None


# JAX steps


def test_each_step_sees_what_torch_wrote(session, x):
    step = session.jax_step(total)
    for number in range(3):
        x.fill_(number)
        assert step().item() == 4 * number
        assert session.arrays["x"].tolist() == [number] * 4


def test_an_update_is_written_to_the_registered_memory(copying, x):
    pointer = x.data_ptr()
    step = copying.jax_step(lambda buffers, by: (buffers["y"].sum(), {"x": buffers["x"] + by}), updates=("x",))
    for number in range(1, 4):
        assert step(2.0).item() == 4
        assert x.tolist() == [2.0 * number + place for place in range(4)]
        assert copying.pointers["x"] == [(pointer, pointer)]
    x.zero_()
    step(1.0)
    assert x.tolist() == [1.0] * 4
    assert copying.tensors["y"].tolist() == [1.0] * 4


def test_an_update_of_a_cache_and_of_a_tree():
    cache = swa_torch.PagedCache(torch.zeros(2, 2, 4, 1, 16, dtype=torch.bfloat16), LAYOUT)
    trees = {"cache": cache, "tree": [torch.zeros(2), {"deep": torch.zeros(3)}]}
    with Session(trees, copy=True) as session:

        def work(buffers):
            base = buffers["cache"].bases[0]
            first, rest = buffers["tree"]
            new = {"tree": [first + 1, {"deep": rest["deep"] + 2}]}
            return None, {**new, "cache": swa_pallas.PagedCache(base + 3, buffers["cache"].layout)}

        session.jax_step(work, updates=("cache", "tree"))()
        assert (cache.bases[0] == 3).all()
        assert trees["tree"][0].tolist() == [1.0] * 2
        assert trees["tree"][1]["deep"].tolist() == [2.0] * 3
        assert_shared(session)


def test_updates_that_only_pass_buffers_on(copying, x):
    """Unchanged, or in each other's place."""
    copying.jax_step(lambda buffers: (None, {"x": buffers["x"]}), updates="x")()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    swapped = copying.jax_step(lambda buffers: (None, {"x": buffers["y"], "y": buffers["x"]}), updates=("x", "y"))
    swapped()
    assert x.tolist() == [1.0] * 4
    assert copying.tensors["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert_shared(copying)


def test_a_result_that_is_also_the_update_is_memory_of_its_own(copying, x):
    def both(buffers):
        new = buffers["x"] + 1
        return new, {"x": new}

    result = copying.jax_step(both, updates="x")()
    result.zero_()
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_results_come_in_their_tree(session):
    def work(buffers):
        sums = buffers["x"].sum()
        return {"a": sums, "b": (buffers["x"] * 2, [sums + 1])}

    results = session.jax_step(work)()
    assert results["a"].item() == 6
    assert results["b"][0].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert results["b"][1][0].item() == 7
    assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(results))
    assert session.jax_step(lambda buffers: None)() is None


def test_arguments_of_every_kind(session):
    step = session.jax_step(lambda buffers, a, *, b: (buffers["x"] * a).sum() + b["deep"].sum())
    for ones in (torch.ones(4), jnp.ones(4), np.ones(4, np.float32)):
        for two in (torch.tensor(2.0), jnp.float32(2), np.float32(2), 2.0, 2):
            assert step(ones, b={"deep": jnp.asarray(two) if isinstance(two, (int, float)) else two}).item() == 8
        assert step(3, b={"deep": ones}).item() == 22


def test_arguments_are_read_in_place(session):
    values = torch.zeros(4)
    step = session.jax_step(lambda buffers, values: values.sum() + buffers["x"].sum())
    for number in range(3):
        values.fill_(number)
        assert step(values).item() == 6 + 4 * number


@pytest.mark.parametrize(
    "function, arguments",
    [
        (lambda buffers: buffers["x"], ()),
        (lambda buffers: {"total": buffers["x"].sum(), "x": [buffers["x"]]}, ()),
        (lambda buffers, argument: argument, (3,)),
        (lambda buffers, argument: (argument,), (torch.ones(4),)),
    ],
)
def test_returning_what_was_given_is_refused(session, function, arguments):
    with pytest.raises(ValueError, match=r"a step must return what it computed.*got a buffer or an argument among"):
        session.jax_step(function)(*arguments)
    assert session.jax_step(total)().item() == 6


@pytest.mark.parametrize(
    "function, error, words",
    [
        (lambda buffers: {"x": buffers["x"]}, TypeError, r"must return \(results, {name: new buffer}\), got dict"),
        (lambda buffers: (1, 2, {"x": buffers["x"]}), TypeError, r"must return \(results, .*, got PyTreeDef"),
        (lambda buffers: (None, {}), ValueError, r"a new buffer for each of its updates \(x\), got none"),
        (lambda buffers: (None, dict(buffers)), ValueError, r"for each of its updates \(x\), got x, y"),
        (lambda buffers: (None, {"x": buffers["x"][:2]}), ValueError, r"keep its .* float32\[4\], got float32\[2\]"),
        (
            lambda buffers: (None, {"x": buffers["x"].astype(jnp.int8)}),
            ValueError,
            r"the new buffers\['x'\] must keep its shape and dtype, float32\[4\], got int8\[4\]",
        ),
        (lambda buffers: (None, {"x": [buffers["x"]]}), ValueError, r"the new buffers\['x'\] must have the structure"),
    ],
)
def test_updates_that_do_not_fit(copying, x, function, error, words):
    with pytest.raises(error, match=words):
        copying.jax_step(function, updates=("x",))()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert_shared(copying)
    copying.jax_step(grown, updates=("x",))()
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_updates_that_are_refused_beforehand(session, copying):
    with pytest.raises(ValueError, match=r"copy=True, which copies 16 bytes back every step, got updates=\('x',\)"):
        session.jax_step(grown, updates="x")
    with pytest.raises(ValueError, match=r"updates must name buffers of this session \(x, y\), got 'z'"):
        copying.jax_step(grown, updates="z")
    with pytest.raises(ValueError, match=r"updates must name each buffer once, got \('x', 'x'\)"):
        copying.jax_step(grown, updates=("x", "x"))


@pytest.mark.parametrize(
    "argument, error, words",
    [
        (torch.ones(8)[::2], ValueError, r"args\[0\] must be contiguous"),
        (torch.arange(4), TypeError, "must not be int64 while jax_enable_x64 is off"),
        (torch.ones(4, requires_grad=True), ValueError, "must not require grad"),
        (torch.ones(4, device="meta"), ValueError, r"args\[0\] must be on cpu, got a tensor on meta"),
    ],
)
def test_arguments_that_cannot_cross(session, argument, error, words):
    step = session.jax_step(lambda buffers, values: values.sum())
    with pytest.raises(error, match=words):
        step(argument)
    assert step(torch.ones(4)).item() == 4


@pytest.mark.parametrize("updates", [(), ("x",)])
def test_an_exception_in_the_function_leaves_the_session_usable(copying, x, updates):
    def fails(buffers):
        raise KeyError("in the function")

    with pytest.raises(KeyError, match="in the function"):
        copying.jax_step(fails, updates=updates)()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert_shared(copying)
    assert copying.jax_step(total)().item() == 6


def test_a_step_is_traced_once_for_each_shape(session):
    traced = []

    def work(buffers, values):
        traced.append(values.shape)
        return buffers["x"].sum() + values.sum()

    step = session.jax_step(work)
    for size in (2, 3, 2, 3):
        assert step(torch.ones(size)).item() == 6 + size
    assert traced == [(2,), (3,)]
    assert step.__wrapped__ is work


# torch steps


def test_a_torch_step_reads_writes_and_returns_arrays(session, x):
    def work(buffers, values, *, scale):
        buffers["x"].add_(values)
        return {"total": buffers["x"].sum() * scale, "count": 3}

    step = session.torch_step(work)
    assert step.__wrapped__ is work
    result = step(jnp.ones(4), scale=jnp.float32(2))
    assert isinstance(result["total"], jax.Array)
    assert result["total"].item() == 20
    assert result["count"] == 3
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert session.jax_step(total)().item() == 10


def test_what_a_torch_step_is_given_is_not_copied(session):
    array, seen = jnp.ones(4), []

    def work(buffers, values):
        seen.append(values.data_ptr())
        return values * 2

    assert session.torch_step(work)(array).tolist() == [2.0] * 4
    assert seen == [array.unsafe_buffer_pointer()]
    assert session.torch_step(lambda buffers: None)() is None


def test_a_torch_step_that_cannot_cross(session):
    with pytest.raises(TypeError, match=r"must have a dtype that both frameworks share.*got int16"):
        session.torch_step(lambda buffers, values: values)(jnp.ones(4, jnp.int16))
    with pytest.raises(ValueError, match="must be contiguous"):
        session.torch_step(lambda buffers: buffers["x"][::2])()
    with pytest.raises(ZeroDivisionError):
        session.torch_step(lambda buffers: 1 // 0)()
    assert session.torch_step(lambda buffers: buffers["x"].sum())().item() == 6


def test_steps_of_both_frameworks_in_turn(copying, x):
    """Each updates; the order is the program's."""
    grow = copying.jax_step(grown, updates="x")
    double = copying.torch_step(lambda buffers: buffers["x"].mul_(2).sum())
    x.zero_()
    sums = []
    for _ in range(3):
        grow()
        sums.append(double().item())
    assert sums == [8.0, 24.0, 56.0]
