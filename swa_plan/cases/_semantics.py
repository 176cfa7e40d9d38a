"""What a step computes: windows, rows, ranges, scores, outputs.

Cases are small, because an interpreter runs them: windows are mostly 20 to 128 and requests few. A value that looks
arbitrary is next to a boundary: of the window, of a 16- or 64-key tile, of a page or of a power of two.
"""

from __future__ import annotations

from swa_plan.cases._case import Case, sized

_WINDOW_EDGES = (
    sized("window-edge", "window counts the row's own key: lengths W-1, W, W+1, W+2", (63, 64, 65, 66), 64),
    sized("window-edge-512", "the same at the width of real models, several tiles", (511, 512, 513), 512, dim=16),
    sized("window-one", "only the row's own key: the LSE is its logit", (1, 2, 17), 1),
    sized("window-none", "full causal attention has no lower edge", (1, 40, 100), None),
    sized("window-far", "a long history: all but the last pages stay unread", (1000, 20), 100, heads=2, kv_heads=1),
    sized("window-mid-page", "the lower edge falls inside a page, and the upper too", (75, 90, 107), 37, block=24),
)

_SHORT_AND_EMPTY = (
    sized("short", "1 key of a wide window: every split chunk but one is empty", (1, 2, 3, 33), 512, heads=2),
    sized("empty-requests", "graph padding: rows without keys are written", (0, 5, 0, 70), 64, gate=True),
    sized("all-empty", "a bucket of nothing but padding", (0, 0), 64, gate=True, sinks=True, max_blocks=2),
    sized("negative-length", "a negative length counts as 0", (-3, 20), 32, gate=True),
)

_VERIFY_ROWS = (
    sized("verify-2", "two rows: each has its own edge", (65, 130), 64, query_len=2),
    sized(
        "verify-4",
        "four rows pack into one program: the union of their ranges is W + 3 keys",
        (67, 600),
        64,
        query_len=4,
    ),
    sized("verify-5", "a row count that is no power of two", (64, 90), 64, query_len=5),
    sized(
        "verify-short", "rows before the sequence's start see nothing beside rows that do", (0, 2, 3), 32, query_len=4
    ),
    sized("verify-gate", "the gate's row index runs with packed rows", (80, 33), 64, query_len=4, gate=True, heads=12),
    sized("verify-sinks", "the sink is per head, not per packed row", (80, 33), 64, query_len=4, sinks=True, heads=12),
    sized(
        "verify-6x12", "72 rows a kv head are more than one 64-row tile", (70,), 64, query_len=6, heads=12, kv_heads=1
    ),
)

_RAGGED = (
    sized(
        "ragged",
        "rows differ by request, one has none, padding follows",
        (70, 20, 9, 40),
        64,
        query_len=4,
        row_counts=(4, 0, 1, 3),
        padding_rows=3,
        gate=True,
    ),
    sized(
        "ragged-like-uniform",
        "13 rows padded to 16 = 4 x 4 must not be read as uniform",
        (30, 40, 50, 60),
        32,
        query_len=4,
        row_counts=(4, 4, 4, 1),
        padding_rows=3,
    ),
    sized(
        "ragged-over-bound",
        "a request above the bound is NaN and disturbs no neighbour",
        (40, 50, 20),
        32,
        query_len=2,
        row_counts=(2, 3, 1),
        padding_rows=1,
        gate=True,
    ),
    sized(
        "ragged-no-rows",
        "nothing but padding rows",
        (40, 5),
        32,
        query_len=2,
        row_counts=(0, 0),
        padding_rows=2,
        gate=True,
    ),
    sized(
        "ragged-short",
        "rows before the sequence's start, ragged",
        (2, 0, 1),
        32,
        query_len=4,
        row_counts=(4, 3, 1),
        sinks=True,
    ),
)

_RANGES = (
    sized(
        "kv-range",
        "a shard of the context: inside, cut left, cut right, past the end",
        (90, 90, 90, 90),
        64,
        kv_range=((40, 60), (0, 50), (80, 200), (95, 120)),
    ),
    sized(
        "kv-range-empty",
        "an empty range is an identity of the merge: 0 and -inf",
        (50, 50, 50),
        64,
        kv_range=((20, 20), (30, 10), (0, 50)),
        sinks=True,
        gate=True,
        out_dtype="float32",
    ),
    sized(
        "kv-range-verify",
        "the range ends between the rows, which do not move",
        (50, 30),
        20,
        query_len=4,
        kv_range=((31, 48), (-5, 29)),
        out_dtype="float32",
    ),
)

_SCORES = (
    sized("sinks", "one extra logit a head, once", (100, 64, 17), 64, sinks=True),
    sized(
        "sinks-short", "with one key the sink weighs most, and splits are empty", (1, 2, 0), 512, sinks=True, gate=True
    ),
    sized("softcap", "tanh before the mask: a masked logit must stay -inf", (100, 20), 64, softcap=5.0),
    sized("scale-zero", "0.0 is a scale, not a missing one", (40, 3), 32, scale=0.0),
    # Large enough that the largest logit stands alone: near ties turn rounding of logits into errors of the output.
    sized(
        "huge-logits",
        "logits of thousands: powers relative to the maximum, no finite mask",
        (70, 20),
        32,
        query_gain=1e3,
    ),
)

_OUTPUT = (
    sized("out-fp32", "partials keep fp32", (100, 9), 64, out_dtype="float32"),
    sized("out-fp32-gate", "the gate's product is rounded to fp32 only", (40, 9), 32, out_dtype="float32", gate=True),
    sized(
        "gate-bf16",
        "sigmoid is rounded to the gate's dtype",
        (40, 9),
        32,
        gate=True,
        gate_dtype="bfloat16",
        dtype="float32",
    ),
    sized("gate-fp16", "gate and output of fp16", (40, 9), 32, gate=True, gate_dtype="float16", dtype="float16"),
    sized("no-lse", "the output alone", (40, 9), 32, lse=False),
)

SEMANTICS: tuple[Case, ...] = (*_WINDOW_EDGES, *_SHORT_AND_EMPTY, *_VERIFY_ROWS, *_RAGGED, *_RANGES, *_SCORES, *_OUTPUT)
