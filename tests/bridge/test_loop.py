"""Two hundred decode steps with JAX appending into memory that torch owns, or the reverse, against torch alone."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and JAX")
jax = pytest.importorskip("jax", reason="needs PyTorch and JAX")

import swa_pallas  # noqa: E402
import swa_torch  # noqa: E402
from bridge import Session, to_jax  # noqa: E402

ON_GPU = torch.cuda.is_available() and jax.default_backend() == "gpu"
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 200 if ON_GPU else 12
REQUESTS, HEADS, KV_HEADS, DIM, WINDOW, BLOCK, PAGES = 3, 8, 2, 64, 48, 16, 64
LAYERS = 4
LAYOUT = "layers pages kv block kv_heads dim"


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, device=DEVICE).to(torch.bfloat16)


def step_inputs(generator):
    key, value = (draw(generator, REQUESTS, KV_HEADS, DIM) for _ in range(2))
    return draw(generator, REQUESTS, HEADS, DIM), key, value


def decode_torch(cache, table, lens, slots, query, key, value):
    outs = []
    for layer in range(LAYERS):
        swa_torch.append(cache, key, value, slots, layer=layer)
        outs.append(swa_torch.swa_decode(query, cache, table, lens, window=WINDOW, layer=layer))
    return torch.stack(outs)


def decode_jax(buffers):
    cache, outs = buffers["cache"], []
    for layer in range(LAYERS):
        cache = swa_pallas.append(cache, buffers["key"], buffers["value"], buffers["slots"], layer=layer)
        outs.append(
            swa_pallas.swa_decode(
                buffers["query"], cache, buffers["table"], buffers["lens"], window=WINDOW, layer=layer
            )
        )
    return jax.numpy.stack(outs), {"cache": cache}


def ulps(out, expected):
    """Return the largest difference in bf16 ulps at the row's largest magnitude."""
    out, expected = out.double(), expected.double()
    ulp = torch.exp2(torch.floor(torch.log2(expected.abs().amax(-1, keepdim=True))) - 7)
    return ((out - expected).abs() / ulp).max()


def run(owner):
    """Return ulps between the outputs of each step, whether the caches agree, all pointers, and memory in use."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    shape = (LAYERS, PAGES, 2, BLOCK, KV_HEADS, DIM)
    alone = swa_torch.PagedCache(draw(generator, *shape), LAYOUT)
    base = alone.bases[0].clone()
    shared = swa_torch.PagedCache(base, LAYOUT)
    if owner == "jax":
        shared = jax.block_until_ready(swa_pallas.PagedCache(jax.numpy.array(to_jax(base), copy=True), LAYOUT))
    pages = torch.randperm(PAGES, generator=generator, device=DEVICE).to(torch.int32)
    table = pages[: REQUESTS * 20].reshape(REQUESTS, 20).contiguous()
    lens = torch.tensor([1, 17, 60], dtype=torch.int32, device=DEVICE)
    query, key, value = step_inputs(generator)
    slots = torch.zeros(REQUESTS, dtype=torch.int32, device=DEVICE)
    buffers = {
        "cache": shared,
        "query": query,
        "key": key,
        "value": value,
        "table": table,
        "lens": lens,
        "slots": slots,
    }
    differences, pointers, memory = torch.zeros(STEPS, device=DEVICE), set(), []
    with Session(buffers, copy=not ON_GPU) as session:
        step = session.jax_step(decode_jax, updates=("cache",))
        for number in range(STEPS):
            for buffer, new in zip((query, key, value), step_inputs(generator), strict=True):
                buffer.copy_(new)
            rows = torch.arange(REQUESTS, device=DEVICE)
            slots.copy_(table[rows, (lens - 1) // BLOCK] * BLOCK + (lens - 1) % BLOCK)
            expected = decode_torch(alone, table, lens, slots, query, key, value)
            out = step()
            differences[number] = ulps(out, expected)
            del out, expected
            lens += 1
            pointers.add(tuple(session.pointers["cache"]))
            if number >= STEPS // 2 and ON_GPU:
                memory.append((torch.cuda.memory_allocated(), jax.local_devices()[0].memory_stats()["bytes_in_use"]))
        same = torch.equal(session.tensors["cache"].bases[0].view(torch.int16), alone.bases[0].view(torch.int16))
    return differences, same, pointers, memory


@pytest.mark.parametrize("owner", ["torch", "jax"])
def test_jax_appends_in_place_step_after_step(owner):
    differences, same, pointers, memory = run(owner)
    assert same, "what JAX appended is not what torch appended"
    ((pair,),) = pointers
    assert pair[0] == pair[1]
    # Two roundings may fall to either side of a midpoint.
    assert differences.max() <= 2, differences
    if ON_GPU:
        assert len(set(memory)) == 1, sorted(set(memory))
