"""What goes wrong around a session without anybody meaning it: each is refused, or cannot make the two sides differ."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import jax.numpy as jnp  # noqa: E402

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import Session, _exchange, to_jax, to_torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")

LAYOUT = "pages kv block kv_heads dim"
SIZES = {"pages": 2, "block": 4, "kv_heads": 1, "k_dim": 16}


def both_see(session, name, values):
    """Assert that both frameworks read the same values at one address."""
    assert all(ours == theirs for ours, theirs in session.pointers[name])
    assert session.tensors[name].tolist() == values
    assert session.jax_step(lambda buffers: buffers[name] + 0)().tolist() == values


def moved_by_set(tensor):
    tensor.set_(torch.zeros(4).untyped_storage(), 0, (4,))


def moved_by_data(tensor):
    tensor.data = torch.zeros(4)


def moved_by_resize(tensor):
    tensor.untyped_storage().resize_(1 << 22)


@pytest.mark.parametrize("move", [moved_by_set, moved_by_data, moved_by_resize])
def test_a_tensor_that_was_given_other_memory(session, x, move):
    step = session.jax_step(lambda buffers: buffers["x"].sum())
    step()
    move(x)
    for work in (step, session.torch_step(lambda buffers: None), lambda: session.arrays):
        with pytest.raises(RuntimeError, match=r"buffers\['x'\] must stay where it was registered, got a tensor moved"):
            work()


def test_the_buffer_that_was_moved_is_named(session):
    session.tensors["y"].data = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"buffers\['y'\] must stay where it was registered"):
        session.jax_step(lambda buffers: buffers["x"].sum())()


def test_two_tensors_that_changed_places(session, x):
    y = session.tensors["y"]
    x.data, y.data = y.data, x.data
    with pytest.raises(RuntimeError, match=r"buffers\['x'\] must stay where it was registered"):
        session.jax_step(lambda buffers: buffers["x"].sum())()


def test_an_import_keeps_the_memory_it_was_made_on():
    """The capsule of a tensor holds the tensor, which `.data =` sends elsewhere."""
    tensor = torch.ones(1 << 16)
    array = to_jax(tensor)
    tensor.data = torch.zeros(4)
    gc.collect()
    junk = [torch.full((1 << 16,), -1.0) for _ in range(4)]
    assert float(array.sum()) == 1 << 16
    del junk


@pytest.mark.parametrize("result", [lambda: jnp.zeros(4, jnp.int4), lambda: jax.random.key(0)], ids=["int4", "key"])
def test_a_result_that_cannot_cross_leaves_the_session_whole(copying, result):
    step = copying.jax_step(lambda buffers: (result(), {"x": buffers["x"] + 5}), updates="x")
    with pytest.raises(TypeError, match="a result of a step must have a dtype"):
        step()
    both_see(copying, "x", [0.0, 1.0, 2.0, 3.0])


def test_a_failure_after_dispatch_leaves_the_session_whole(copying, monkeypatch):
    from bridge import _steps

    def broken(array, stream):
        raise OSError("no export today")

    step = copying.jax_step(lambda buffers: (buffers["y"].sum(), {"x": buffers["x"] + 5}), updates="x")
    wait, waited = jax.block_until_ready, []
    with monkeypatch.context() as patch:
        patch.setattr(_steps, "await_result", broken)
        patch.setattr(jax, "block_until_ready", lambda outcome: waited.append(len(outcome)) or wait(outcome))
        with pytest.raises(OSError, match="no export today"):
            step()
    assert waited == [3]  # updates, results and fence of the program that nothing else waits for
    both_see(copying, "x", [0.0, 1.0, 2.0, 3.0])
    step()
    both_see(copying, "x", [5.0, 6.0, 7.0, 8.0])


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_inside_a_transformation(copying, transform):
    """A program that is traced runs its Python once, and would keep what it saw then."""
    steps = [
        copying.jax_step(lambda buffers: buffers["x"].sum()),
        copying.jax_step(lambda buffers: (None, {"x": buffers["x"] + 1}), updates="x"),
        copying.torch_step(lambda buffers: None),
        lambda: copying.arrays,
        lambda: copying.turn().__enter__(),
    ]
    for step in steps:

        def program(value, step=step):
            step()
            return value.sum()

        with pytest.raises(RuntimeError, match=r"a step must be called outside jax\.jit"):
            transform(program)(jnp.ones(1))
    both_see(copying, "x", [0.0, 1.0, 2.0, 3.0])


def test_no_export_inside_a_transformation():
    array = jnp.ones(4)
    with pytest.raises(RuntimeError, match=r"to_torch must be called outside jax\.jit"):
        jax.jit(lambda value: value + to_torch(array).sum().item())(1.0)


def test_an_argument_on_an_updated_buffers_memory(copying, x):
    """XLA would be told to write memory that it is also given to read."""
    step = copying.jax_step(lambda buffers, values: (values.sum(), {"x": buffers["x"] + 1}), updates="x")
    for argument in (x, x.view(2, 2), copying.arrays["x"], to_jax(x)):
        with pytest.raises(ValueError, match=r"args\[0\] must not share memory with buffers\['x'\]"):
            step(argument)
    with pytest.raises(ValueError, match=r"kwargs\['values'\] must not share memory"):
        step(values=x)
    assert float(step(x.clone())) == 6.0
    assert float(copying.jax_step(lambda buffers, values: values.sum())(x)) == 10.0  # read by all: no harm


def test_a_torch_step_that_replaces_a_buffer(session):
    def replace(buffers):
        buffers["x"] = buffers["x"] + 1

    with pytest.raises(ValueError, match=r"must write into buffers\['x'\] in place \(copy_\), got it replaced"):
        session.torch_step(replace)()
    both_see(session, "x", [0.0, 1.0, 2.0, 3.0])


def test_trees_cannot_be_changed_from_outside():
    ours = {"t": [torch.zeros(4), torch.ones(4)]}
    with Session(ours) as session:

        def replace(buffers):
            buffers["t"][0] = buffers["t"][0] + 1

        with pytest.raises(ValueError, match=r"must write into buffers\['t'\] in place"):
            session.torch_step(replace)()
        session.tensors["t"][0] = torch.full((4,), 7.0)
        ours["t"][0] = torch.full((4,), 8.0)
        session.tensors["t"][0].fill_(3)
        assert session.jax_step(lambda buffers: buffers["t"][0] + 0)().tolist() == [3.0] * 4


def test_a_jax_step_that_replaces_what_it_does_not_update(copying):
    def replace(buffers):
        buffers["y"] = buffers["y"] + 1
        return buffers["y"].sum(), {"x": buffers["x"] + 1}

    with pytest.raises(ValueError, match=r"replaces buffers\['y'\] must .* got updates=\('x',\)"):
        copying.jax_step(replace, updates="x")()
    both_see(copying, "x", [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "result", [lambda x: x, lambda x: x[:2], lambda x: x.view(2, 2)], ids=["whole", "part", "view"]
)
def test_a_torch_step_that_returns_a_buffer(session, result):
    """JAX believes that its arrays do not change."""
    with pytest.raises(ValueError, match=r"a result of a torch step must not share memory with buffers\['x'\].*clone"):
        session.torch_step(lambda buffers: result(buffers["x"]))()
    returned = session.torch_step(lambda buffers: result(buffers["x"]).clone())()
    assert isinstance(returned, jax.Array)


def test_int64_buffers_stay_what_they_are():
    with jax.enable_x64(True):
        z = torch.arange(4)
        session = Session({"z": z}, copy=True)
        step = session.jax_step(lambda buffers: (None, {"z": buffers["z"] + 1}), updates="z")
        step()
    with pytest.raises(TypeError, match=r"buffers\['z'\] must not be int64"):
        session.arrays  # noqa: B018
    with jax.enable_x64(True):
        z.fill_(5)
        both_see(session, "z", [5] * 4)


def test_a_weak_type_does_not_stay_in_a_buffer(copying):
    """With it the next step would compile again, and promote to other dtypes."""
    step = copying.jax_step(
        lambda buffers, flag: (buffers["x"].sum(), {"x": jnp.broadcast_to(jnp.where(flag, 1.0, 2.0), (4,))}),
        updates="x",
    )
    jaxpr = jax.make_jaxpr(lambda *arguments: step._run(*arguments))(
        jnp.zeros(16, jnp.int32), [copying._buffers["x"].arrays], [copying._buffers["y"].arrays], (True,), {}
    )
    assert not any(output.weak_type for output in jaxpr.out_avals[:1])
    step(True)
    both_see(copying, "x", [1.0] * 4)


def test_a_number_for_a_buffer(copying):
    with pytest.raises(ValueError, match=r"the new buffers\['x'\] must keep its shape and dtype, float32\[4\]"):
        copying.jax_step(lambda buffers: (None, {"x": 3.0}), updates="x")()


def test_caches_cross_as_arguments_and_results(session):
    theirs = swa_pallas.PagedCache.empty(LAYOUT, **SIZES)
    ours = swa_torch.PagedCache(torch.ones(2, 2, 4, 1, 16), LAYOUT)
    kinds = []
    session.torch_step(lambda buffers, cache: kinds.append(type(cache)))(theirs)
    session.jax_step(lambda buffers, cache: kinds.append(type(cache)) or cache.bases[0].sum())(ours)
    assert kinds == [swa_torch.PagedCache, swa_pallas.PagedCache]
    crossed = session.torch_step(lambda buffers: ours)()
    assert isinstance(crossed, swa_pallas.PagedCache)
    assert crossed.bases[0].unsafe_buffer_pointer() == ours.bases[0].data_ptr()
    doubled = session.jax_step(lambda buffers, cache: jax.tree.map(lambda base: base * 2, cache))(ours)
    assert isinstance(doubled, swa_torch.PagedCache)
    assert torch.equal(doubled.bases[0], ours.bases[0] * 2)


def test_pointers_after_close(session):
    session.close()
    with pytest.raises(RuntimeError, match="the session must be open"):
        session.pointers  # noqa: B018


def test_an_array_on_another_device(session):
    """Committed elsewhere; an uncommitted one goes where the step is."""
    step = session.jax_step(lambda buffers, value: buffers["x"].sum() + value)
    assert float(step(jnp.float32(1))) == 7.0
    if len(jax.devices()) > 1:
        other = jax.device_put(jnp.float32(1), jax.devices()[1])
        with pytest.raises(ValueError, match=r"args\[0\] must be on"):
            step(other)


def test_torch_compile_breaks_its_graph_at_a_step(session):
    step = session.jax_step(lambda buffers: buffers["x"].sum())

    def around(value):
        return value * 2 + step()

    compiled = torch.compile(around, backend="eager")
    assert float(compiled(torch.ones(()))) == 8.0


def test_copies_come_after_the_checks(monkeypatch):
    """A stream under capture would record the clone."""

    def refuse(device):
        raise RuntimeError("capturing")

    cloned = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(_exchange, "check_not_capturing", refuse)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **options: cloned.append(1) or clone(tensor, **options))
    with pytest.raises(RuntimeError, match="capturing"):
        to_jax(torch.ones(4), copy=True)
    assert not cloned


def test_programs_are_named_for_profiles(session):
    def decode_all_layers(buffers):
        return buffers["x"].sum()

    step = session.jax_step(decode_all_layers)
    lowered = step._jitted.lower(jnp.zeros(16, jnp.int32), [], [buffer.arrays for buffer in step._read], (), {})
    assert "swa_step_decode_all_layers" in lowered.as_text()
    assert "tensor<16xi32>" in lowered.as_text(), (
        "the ticket is no argument of the program, which then waits for nothing"
    )


def test_an_update_that_is_passed_on_is_written(copying):
    """Handed through, it would be the donated array itself and no output of the program."""
    step = copying.jax_step(lambda buffers: (buffers["y"].sum(), {"x": buffers["x"]}), updates="x")
    jaxpr = jax.make_jaxpr(lambda *arguments: step._run(*arguments))(
        jnp.zeros(16, jnp.int32), [copying._buffers["x"].arrays], [copying._buffers["y"].arrays], (), {}
    )
    assert jaxpr.jaxpr.outvars[0] not in jaxpr.jaxpr.invars


def test_an_import_that_was_copied_is_refused(monkeypatch):
    monkeypatch.setattr(_exchange.dlpack, "from_dlpack", lambda tensor, copy: jnp.asarray(tensor.numpy()) + 0)
    with pytest.raises(RuntimeError, match="x was copied by JAX although it must not be"):
        to_jax(torch.ones(4))
