"""How a step is stored: quantised caches, layouts, pages, head groups and sizes, and the shapes of real models."""

from __future__ import annotations

from swa_plan.cases._case import Case, sized

_QUANTISED = (
    sized("fp8-e4m3", "scales of a cache apply to logits and output", (70, 20), 64, cache_dtype="float8_e4m3fn"),
    sized(
        "fp8-e5m2",
        "stored values up to 57344",
        (70, 20),
        64,
        cache_dtype="float8_e5m2",
        k_scale="scalar",
        v_scale="scalar",
    ),
    sized(
        "fp8-softcap",
        "the key scale comes before the cap, the sink is not capped",
        (70, 20),
        64,
        cache_dtype="float8_e4m3fn",
        softcap=2.0,
        k_scale="head",
        sinks=True,
    ),
    sized(
        "fp8-verify-gate",
        "the value scale comes before the first rounding, the gate after",
        (70, 20),
        64,
        cache_dtype="float8_e4m3fn",
        query_len=4,
        v_scale="head",
        gate=True,
    ),
    sized(
        "int8-per-head",
        "one scale a kv head",
        (70, 20),
        64,
        cache_dtype="int8",
        heads=9,
        kv_heads=3,
        k_scale="head",
        v_scale="head",
    ),
    sized(
        "int8-packed-layers",
        "a quantised cache in one allocation, unequal heads",
        (40, 17),
        32,
        cache_dtype="int8",
        layout="layers pages kv_heads block (kv dim)",
        layers=2,
        layer=1,
        k_dim=96,
        v_dim=64,
        k_scale="head",
    ),
)

_LAYOUTS = (
    sized("layout-hnd", "two arrays, heads outside the page's slots", (40, 17), 32, layout="pages kv_heads block dim"),
    sized("layout-kv-pages", "K's pages, then V's", (40, 17), 32, layout="kv pages block kv_heads dim"),
    sized(
        "layout-pages-kv",
        "K and V of a page side by side: the page stride is doubled",
        (40, 17),
        32,
        layout="pages kv block kv_heads dim",
    ),
    sized(
        "layout-packed-hnd",
        "192 and 128 values share the last axis",
        (40, 17),
        32,
        layout="pages kv_heads block (kv dim)",
        k_dim=192,
        v_dim=128,
    ),
    sized(
        "layout-packed-nhd",
        "192 and 128 values share the last axis, slots outside heads",
        (40, 17),
        32,
        layout="pages block kv_heads (kv dim)",
        k_dim=192,
        v_dim=128,
        query_len=2,
    ),
    sized(
        "layout-layers-first",
        "a whole model in one allocation, two arrays",
        (40, 17),
        32,
        layout="layers pages block kv_heads dim",
        layers=3,
        layer=1,
    ),
    sized(
        "layout-layers-inner",
        "layers inside a page: the page stride spans the model",
        (40, 17),
        32,
        layout="pages layers kv block kv_heads dim",
        layers=3,
        layer=2,
    ),
    sized(
        "layout-layers-inner-packed",
        "layers inside a page, packed",
        (40, 17),
        32,
        layout="pages layers kv_heads block (kv dim)",
        layers=2,
        layer=1,
        k_dim=48,
        v_dim=80,
    ),
)

_PAGES = (
    sized("block-1", "a page a token", (40, 3), 32, block=1),
    sized("block-3", "pages that divide no tile", (64, 65, 5), 32, block=3),
    sized("block-24", "a page that is no power of two", (65, 48, 23), 64, block=24, query_len=2),
    sized("block-64", "a page as large as a tile", (65, 63, 130), 64, block=64),
    sized(
        "block-528",
        "a hybrid model's page, larger than the window",
        (527, 528, 529),
        64,
        block=528,
        heads=2,
        kv_heads=1,
    ),
    sized(
        "int64",
        "64-bit tables and lengths with 32-bit offsets",
        (40, 17),
        32,
        index_dtype="int64",
        query_len=2,
        row_counts=(1, 2),
    ),
    sized(
        "invalid-page",
        "ids below 0 and beyond the pool make the rows that see them NaN, no others",
        (50, 50, 50, 50),
        32,
        invalid_pages=((0, 2, -1), (1, 3, 2**31 - 1), (3, 1, 10**6)),
        gate=True,
        sinks=True,
    ),
    sized(
        "invalid-page-one-row",
        "only the later rows of a request see the page",
        (50, 20),
        16,
        query_len=4,
        invalid_pages=((0, 3, 10**6),),
    ),
    sized("beyond-table-rows", "the earlier rows still end within the table", (50, 20), 32, max_blocks=3, query_len=4),
)

_GROUPS = tuple(
    sized(f"group-{group}", why, (40, 9), 32, heads=group * kv_heads, kv_heads=kv_heads, dim=dim, **fields)
    for group, kv_heads, dim, why, fields in (
        (1, 3, 64, "multi-head attention: a tile with one used row", {"gate": True}),
        (3, 2, 64, "a group that is no power of two", {"sinks": True}),
        (5, 2, 64, "a group that is no power of two, two rows", {"query_len": 2, "gate": True}),
        (12, 2, 64, "12 of 16 rows used: the next kv head's heads follow directly", {"gate": True, "sinks": True}),
        (16, 1, 64, "an exactly full tile", {"query_len": 4}),
        (17, 2, 16, "one head more than a 16-row tile", {"gate": True}),
        (24, 2, 32, "a second tile half used", {"sinks": True}),
        (48, 1, 16, "three quarters of 64 rows", {"gate": True}),
        (71, 1, 16, "more heads than a 64-row tile", {"gate": True, "sinks": True}),
    )
)

_DIMS = tuple(
    sized(f"dim-{k_dim}-{v_dim}", why, (40, 17), 32, heads=2, kv_heads=1, k_dim=k_dim, v_dim=v_dim, dtype=dtype)
    for k_dim, v_dim, dtype, why in (
        (16, 16, "float16", "the smallest head"),
        (48, 48, "bfloat16", "3 x 16"),
        (80, 80, "float16", "64 + 16"),
        (96, 96, "float32", "3 x 32"),
        (112, 112, "bfloat16", "7 x 16: little of the padding is used"),
        (128, 128, "float32", "the usual head"),
        (144, 144, "float16", "9 x 16: pads to 256 unless cut"),
        (240, 240, "bfloat16", "15 x 16"),
        (256, 256, "float32", "the largest head"),
        (64, 256, "bfloat16", "values longer than keys"),
    )
)

_MODELS = (
    sized(
        "step5-tp4",
        "16 heads on one kv head, 192, verify rows, gate",
        (600, 130),
        512,
        query_len=4,
        heads=16,
        kv_heads=1,
        dim=192,
        block=64,
        gate=True,
        gate_dtype="bfloat16",
    ),
    sized(
        "step3.7-tp8", "12 heads on one kv head, 128, gate", (530, 60), 512, heads=12, kv_heads=1, dim=128, gate=True
    ),
    sized(
        "mimo-v2-tp4",
        "192 / 128 with sinks, window 128",
        (200, 100),
        128,
        heads=16,
        kv_heads=2,
        k_dim=192,
        v_dim=128,
        sinks=True,
    ),
    sized("gpt-oss-tp4", "64 with sinks, window 128", (200, 100, 1), 128, heads=16, kv_heads=2, dim=64, sinks=True),
    sized(
        "gemma2-tp4",
        "256 with softcap, a window longer than the context",
        (150, 60),
        4096,
        heads=4,
        kv_heads=2,
        dim=256,
        softcap=50.0,
    ),
    sized(
        "gemma3-tp4",
        "256, window 1024, fp8 cache",
        (150, 60),
        1024,
        heads=4,
        kv_heads=2,
        dim=256,
        cache_dtype="float8_e4m3fn",
    ),
)

STORAGE: tuple[Case, ...] = (*_QUANTISED, *_LAYOUTS, *_PAGES, *_GROUPS, *_DIMS, *_MODELS)
