"""The Hopper kernel compiles for sm_90 without a GPU: no spills, and in no more shared memory than its plans count on.

What is compiled is what the planner picks for an H200. Each compilation takes seconds, so each case is a form of the
kernel that no other has.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
    pytest.skip("Triton interprets in this process, so nothing can be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")

import triton

from swa_plan import DeviceProfile, Problem, plan
from swa_plan._hopper import HOPPER_CAPABILITY, hopper_rows, hopper_shared_bytes
from swa_torch._device import why_no_gluon
from tests.compile.offline import Recorder, cubin_resources, record_hopper

ABSENT = why_no_gluon(HOPPER_CAPABILITY, triton.__version__)
if ABSENT is not None:
    pytest.skip(f"the Hopper kernel {ABSENT}", allow_module_level=True)

H200 = DeviceProfile.named("h200")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def index(count):
    return zeros(count, dtype=torch.int32)


def every_option(rows, heads):
    """Return all optional tensors of a call of one ragged request."""
    return {
        "gate": zeros(rows, heads), "lse": zeros(rows, heads), "sinks": zeros(heads), "softcap": 30.0,
        "cu_query_lens": index(2), "kv_start": index(1), "kv_end": index(1), "k_scale": zeros(2), "v_scale": zeros(),
    }  # fmt: skip


def problem(requests, kv_heads, group, dim=192, v_dim=None, window=512, block=64, **fields):
    return Problem(
        requests, kv_heads * group, kv_heads, dim, v_dim or dim, window, block, max(2, 4096 // block), **fields
    )


# name: (problem, options of the call, rows of a program, splits)
FORMS = {
    "one split": (problem(16, 8, 8), {"gate": zeros(1, 64), "lse": zeros(1, 64)}, 8, 1),
    "splits": (problem(8, 1, 16), {"gate": zeros(1, 16)}, 16, 8),
    "packed rows": (problem(32, 8, 8, query_len=4), {"gate": zeros(4, 64)}, 32, 1),
    "two warpgroups, few tiles": (problem(264, 2, 8, window=200, query_len=4), {}, 32, 1),
    "64 rows": (problem(128, 1, 48), {}, 64, 1),
    "several segments": (problem(64, 8, 8, 128, window=None), {}, 8, 8),
    "64 rows, several segments": (problem(128, 1, 48, 256, window=None), {"softcap": 50.0}, 64, 8),
    "small pages": (problem(16, 8, 8, block=16), {}, 8, 1),
    "pages of several boxes": (problem(16, 8, 8, block=528), {}, 8, 1),
    "widest heads": (problem(64, 2, 8, 256, window=1024), {"softcap": 50.0}, 8, 2),
    "every option": (
        problem(64, 2, 8, 80, 112, 128, dtype="float16", query_len=4, ragged=True), every_option(4, 16), 32, 1
    ),
    "every option, splits": (
        problem(4, 2, 8, 192, 128, dtype="float16", query_len=2, ragged=True), every_option(2, 16), 16, 7
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_compiles_without_spills(monkeypatch, name):
    posed, options, rows, splits = FORMS[name]
    chosen = plan(posed, H200, kernel="hopper")
    split, combine = record_hopper(monkeypatch, chosen, **options)
    assert len(split.launches) == 1, "handed over to the portable kernel"
    assert bool(combine.launches) == (chosen.splits > 1)
    met = (hopper_rows(posed, chosen.pack), chosen.splits)
    assert met == (rows, splits), "the planner no longer takes this form here: choose a problem where it does"
    compiled = split.build(HOPPER_CAPABILITY)
    registers, spilled_bytes = cubin_resources(compiled.asm["cubin"])
    assert spilled_bytes == 0
    assert registers * 32 * chosen.warps <= 65536
    counted_on = hopper_shared_bytes(posed, chosen.pack, chosen.splits, chosen.stages)
    assert compiled.metadata.shared <= counted_on <= H200.shared_memory
    check_instructions(compiled.asm["ptx"])


def check_instructions(ptx):
    """Products are warpgroups', copies TMA's, no cache is read before the kernel before has ended, and shared memory is
    handed from one use to the next by barriers."""
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert "wgmma.mma_async" in after
    assert "cp.async.bulk.tensor" in after
    assert "ld.global" not in before
    assert "cp.async" not in before
    fenced = False
    for line in ptx.splitlines():
        if "fence.proxy.async" in line:
            fenced = True
        elif "bar.sync" in line:
            fenced = False
        assert not (fenced and "wgmma.mma_async" in line), "a product may read what another warp has yet to fence"
    tail = ptx.rpartition("wgmma.wait_group")[2].splitlines()
    written = next((i for i, line in enumerate(tail) if "st.shared" in line or "stmatrix" in line), 0)
    since_a_branch: list[str] = []
    for line in tail[:written]:
        since_a_branch = [] if "bra" in line or line.startswith("$L__BB") else [*since_a_branch, line]
    held = not written or any("bar.sync" in line for line in since_a_branch)
    assert held, "what the other warpgroup's last product reads may be written over"


SOUND = (
    "griddepcontrol.wait;\n fence.proxy.async;\n bar.sync\n cp.async.bulk.tensor\n wgmma.mma_async\n wgmma.wait_group\n"
)
UNSOUND = {
    "an early load": "ld.global.b32 %r1, [%rd1];\n" + SOUND,
    "an early copy": "cp.async.bulk.tensor.4d [%r5], [%rd1, {%r1, %r1, %r1, %r2}], [%r6];\n" + SOUND,
    "a product after a fence": SOUND.replace("bar.sync", ""),
    "a store after a product": SOUND + "stmatrix.sync\n bar.sync",
    "a barrier on another way": SOUND + "bar.sync\n bra.uni $L__BB2\n$L__BB1:\n stmatrix.sync\n bar.sync",
}


@pytest.mark.parametrize("ptx", UNSOUND.values(), ids=UNSOUND)
def test_what_is_looked_for_would_be_noticed(ptx):
    check_instructions(SOUND)
    check_instructions(SOUND + "bar.sync\n stmatrix.sync")
    with pytest.raises(AssertionError):
        check_instructions(ptx)


def test_what_is_handed_over_launches_the_portable_kernel(monkeypatch):
    from swa_torch._triton import _launch

    posed = problem(16, 2, 8, 64, dtype="float32")
    chosen = plan(posed, H200, kernel="hopper")
    portable = Recorder(_launch.swa_decode_split)
    monkeypatch.setattr(_launch, "swa_decode_split", portable)
    hopper, _ = record_hopper(monkeypatch, chosen)
    assert (len(hopper.launches), len(portable.launches)) == (0, 1)
    assert portable.compile(HOPPER_CAPABILITY).spilled_bytes == 0
