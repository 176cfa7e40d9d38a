"""Cache layouts: sizes, views and messages, against indexing written out by hand."""

import numpy as np
import pytest
import torch

from swa_plan import LAYOUTS, CacheLayout

PAGES, BLOCK, KV_HEADS, LAYERS = 5, 3, 2, 4
K_DIM, V_DIM = 48, 16
LAYER = 2
HALVES = (slice(K_DIM), slice(K_DIM, None))

# Entry (page, slot, head) of K (kv=0) or V (kv=1) in the base(s), written out per layout.
BY_HAND = {
    "pages block kv_heads dim": lambda b, kv, p, s, h: b[kv][p, s, h],
    "pages kv_heads block dim": lambda b, kv, p, s, h: b[kv][p, h, s],
    "kv pages block kv_heads dim": lambda b, kv, p, s, h: b[0][kv, p, s, h],
    "pages kv block kv_heads dim": lambda b, kv, p, s, h: b[0][p, kv, s, h],
    "pages kv_heads block (kv dim)": lambda b, kv, p, s, h: b[0][p, h, s][HALVES[kv]],
    "pages block kv_heads (kv dim)": lambda b, kv, p, s, h: b[0][p, s, h][HALVES[kv]],
    "layers pages block kv_heads dim": lambda b, kv, p, s, h: b[kv][LAYER, p, s, h],
    "layers pages kv_heads block dim": lambda b, kv, p, s, h: b[kv][LAYER, p, h, s],
    "layers kv pages block kv_heads dim": lambda b, kv, p, s, h: b[0][LAYER, kv, p, s, h],
    "layers pages kv block kv_heads dim": lambda b, kv, p, s, h: b[0][LAYER, p, kv, s, h],
    "layers pages kv_heads block (kv dim)": lambda b, kv, p, s, h: b[0][LAYER, p, h, s][HALVES[kv]],
    "layers pages block kv_heads (kv dim)": lambda b, kv, p, s, h: b[0][LAYER, p, s, h][HALVES[kv]],
    "pages layers block kv_heads dim": lambda b, kv, p, s, h: b[kv][p, LAYER, s, h],
    "pages layers kv_heads block dim": lambda b, kv, p, s, h: b[kv][p, LAYER, h, s],
    "kv pages layers block kv_heads dim": lambda b, kv, p, s, h: b[0][kv, p, LAYER, s, h],
    "pages layers kv block kv_heads dim": lambda b, kv, p, s, h: b[0][p, LAYER, kv, s, h],
    "pages layers kv_heads block (kv dim)": lambda b, kv, p, s, h: b[0][p, LAYER, h, s][HALVES[kv]],
    "pages layers block kv_heads (kv dim)": lambda b, kv, p, s, h: b[0][p, LAYER, s, h][HALVES[kv]],
}  # fmt: skip


def dims_of(layout):
    """Return ``(k_dim, v_dim)``: unequal wherever the layout allows it."""
    return (K_DIM, K_DIM) if " kv " in f" {layout.split('(')[0]} " else (K_DIM, V_DIM)


def make_bases(layout):
    """Return bases whose entries are all different."""
    parsed = CacheLayout.parse(layout)
    k_dim, v_dim = dims_of(layout)
    shapes = parsed.shape(
        pages=PAGES, block=BLOCK, kv_heads=KV_HEADS, k_dim=k_dim, v_dim=v_dim,
        layers=LAYERS if parsed.has_layers else None,
    )  # fmt: skip
    sizes = [int(np.prod(shape)) for shape in shapes]
    return tuple(
        (np.arange(size, dtype=np.float32) + 10**6 * number).reshape(shape)
        for number, (size, shape) in enumerate(zip(sizes, shapes, strict=True))
    )


def test_every_layout_of_the_contract_is_written_out_here():
    named = {layout for layout in BY_HAND if "layers" not in layout}
    assert named == set(LAYOUTS)
    for layout in LAYOUTS:
        assert f"layers {layout}" in BY_HAND
        assert layout.replace("pages", "pages layers") in BY_HAND


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", BY_HAND)
def test_views_are_what_the_names_say(layout, framework):
    bases = make_bases(layout)
    parsed = CacheLayout(layout)
    k_dim, v_dim = dims_of(layout)
    given = bases if framework == "numpy" else tuple(torch.from_numpy(base) for base in bases)
    layer = LAYER if parsed.has_layers else None
    views = parsed.views(given, k_dim=k_dim, v_dim=v_dim, layer=layer)
    for kv, view in enumerate(views):
        assert tuple(view.shape) == (PAGES, BLOCK, KV_HEADS, (k_dim, v_dim)[kv])
        for page, slot, head in np.ndindex(PAGES, BLOCK, KV_HEADS):
            expected = BY_HAND[layout](bases, kv, page, slot, head)
            assert np.array_equal(np.asarray(view[page, slot, head]), expected)
        base = given[kv if len(given) == 2 else 0]
        shares = (
            np.shares_memory(view, base)
            if framework == "numpy"
            else view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        )
        assert shares, "a view must not copy"


@pytest.mark.parametrize("layout", BY_HAND)
def test_select_gives_the_same_view(layout):
    bases = make_bases(layout)
    parsed = CacheLayout(layout)
    k_dim, v_dim = dims_of(layout)
    layer = LAYER if parsed.has_layers else None
    for kv, view in enumerate(parsed.views(bases, k_dim=k_dim, v_dim=v_dim, layer=layer)):
        base, index, permutation = parsed.select(kv, k_dim=k_dim, v_dim=v_dim, layer=layer)
        selected = np.transpose(bases[base][index], permutation)
        assert selected.strides == view.strides
        assert np.array_equal(selected, view)


@pytest.mark.parametrize("layout", BY_HAND)
def test_sizes_invert_shape(layout):
    parsed = CacheLayout(layout)
    shapes = [base.shape for base in make_bases(layout)]
    k_dim, v_dim = dims_of(layout)
    sizes = parsed.sizes(shapes, k_dim=k_dim, v_dim=v_dim)
    assert sizes == (PAGES, BLOCK, KV_HEADS, k_dim, v_dim, LAYERS if parsed.has_layers else None)
    assert parsed.bases == len(shapes)
    assert parsed.packed == ("(" in layout)
    if parsed.packed:
        assert parsed.sizes(shapes, k_dim=k_dim) == parsed.sizes(shapes, v_dim=v_dim) == sizes
        assert parsed.sizes(shapes)[3:5] == (32, 32), "unnamed sizes are halves"
    else:
        assert parsed.sizes(shapes) == sizes


@pytest.mark.parametrize(
    "spelling",
    ["pages kv_heads block (kv dim)", "  pages  kv_heads block ( kv  dim ) ", "pages kv_heads block(kv dim)"],
)
def test_one_layout_however_it_is_spelled(spelling):
    layout = CacheLayout(spelling)
    assert layout.spec == "pages kv_heads block (kv dim)"
    assert layout == CacheLayout("pages kv_heads block (kv dim)")
    assert hash(layout) == hash(CacheLayout("pages kv_heads block (kv dim)"))
    assert CacheLayout.parse(layout) is layout
    assert CacheLayout.parse(spelling) == layout


@pytest.mark.parametrize(
    "layout",
    [
        "", "dim", "()", "(", ")", "pages", "pages block kv_heads", "pages block dim", "pages block kv_heads dim dim",
        "pages pages block kv_heads dim", "pages block kv_heads kv (kv dim)", "pages block kv_heads (dim kv)",
        "pages block heads dim", "dim pages block kv_heads", "pages block (kv dim) kv_heads",
        "kv kv pages block kv_heads dim", "layers layers pages block kv_heads dim", "pages (block kv_heads) dim",
        "PAGES block kv_heads dim", "pages,block,kv_heads,dim",
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(layout):
    with pytest.raises(ValueError, match="layout must name") as error:
        CacheLayout(layout)
    assert f"got '{' '.join(layout.split())}"[:8] in str(error.value)


@pytest.mark.parametrize("layout", [None, 3, ("pages", "block", "kv_heads", "dim"), b"pages block kv_heads dim"])
def test_a_layout_is_text(layout):
    with pytest.raises(TypeError, match="layout must be a string of axis names, got "):
        CacheLayout(layout)


SIZES = {"pages": 4, "block": 16, "kv_heads": 2, "k_dim": 64, "v_dim": 64}
WRONG_SIZES = {
    "pages": (-1, ValueError), "block": (0, ValueError), "kv_heads": (0, ValueError), "k_dim": (40, ValueError),
    "v_dim": (272, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_shape_names_a_wrong_size(name):
    value, error = WRONG_SIZES[name]
    with pytest.raises(error, match=f"{name} must be .*got {value}"):
        CacheLayout(LAYOUTS[0]).shape(**{**SIZES, name: value})


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_sizes_are_integers(value):
    with pytest.raises(TypeError, match=f"pages must be an integer, got {value!r}"):
        CacheLayout(LAYOUTS[0]).shape(**{**SIZES, "pages": value})


@pytest.mark.parametrize("layout", [layout for layout in BY_HAND if dims_of(layout)[0] == dims_of(layout)[1]])
def test_a_kv_axis_holds_one_size(layout):
    layers = 2 if "layers" in layout else None
    with pytest.raises(ValueError, match="k_dim=64 and v_dim=32"):
        CacheLayout(layout).shape(**{**SIZES, "v_dim": 32}, layers=layers)


def test_layers_go_with_a_layers_axis():
    with pytest.raises(ValueError, match="layers must be left out for layout 'pages block kv_heads dim', got 2"):
        CacheLayout(LAYOUTS[0]).shape(**SIZES, layers=2)
    with pytest.raises(ValueError, match="layers must be given for layout 'layers pages block kv_heads dim', got None"):
        CacheLayout("layers pages block kv_heads dim").shape(**SIZES)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        CacheLayout("layers pages block kv_heads dim").shape(**SIZES, layers=0)


def test_a_layer_goes_with_a_layers_axis():
    plain, layered = (make_bases(layout) for layout in (LAYOUTS[0], f"layers {LAYOUTS[0]}"))
    with pytest.raises(ValueError, match="layer must be left out for layout 'pages block kv_heads dim', got 0"):
        CacheLayout(LAYOUTS[0]).views(plain, layer=0)
    layout = CacheLayout(f"layers {LAYOUTS[0]}")
    with pytest.raises(ValueError, match=r"layer must be given for layout .*, got None"):
        layout.views(layered)
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match=f"layer must be at .*got {layer}"):
            layout.views(layered, layer=layer)
    for layer in (True, 1.0):
        with pytest.raises(TypeError, match=f"layer must be an integer, got {layer}"):
            layout.views(layered, layer=layer)


@pytest.mark.parametrize(
    ("layout", "shapes", "dims", "message"),
    [
        ("pages block kv_heads dim", [(4, 16, 2, 64)], {}, "1"),
        ("pages block kv_heads dim", [(4, 16, 2, 64)] * 3, {}, "3"),
        ("kv pages block kv_heads dim", [(2, 4, 16, 2, 64)] * 2, {}, "2"),
        ("pages block kv_heads dim", [(4, 16, 128)] * 2, {}, r"\(4, 16, 128\)"),
        ("pages block kv_heads dim", [(4, 16, 2, 64), (5, 16, 2, 64)], {}, r"\(4, 16, 2, 64\) and \(5, 16, 2, 64\)"),
        ("kv pages block kv_heads dim", [(3, 4, 16, 2, 64)], {}, r"axis kv .*size 2, got shape \(3, 4, 16, 2, 64\)"),
        ("pages kv block kv_heads dim", [(3, 4, 16, 2, 64)], {}, r"axis kv .*size 2, got shape \(3, 4, 16, 2, 64\)"),
        ("pages block kv_heads dim", [(4, 16, 2, 64)] * 2, {"k_dim": 32}, "size 64, 64, got k_dim=32"),
        ("pages block kv_heads dim", [(4, 16, 2, 64)] * 2, {"v_dim": 32}, "v_dim=32"),
        ("pages block kv_heads dim", [(4, 16, 2, 40)] * 2, {}, "k_dim must be a multiple of 16 up to 256, got 40"),
        ("pages block kv_heads (kv dim)", [(4, 16, 2, 320)], {"k_dim": 192, "v_dim": 64}, "k_dim=192 and v_dim=64"),
        ("pages block kv_heads (kv dim)", [(4, 16, 2, 320)], {"k_dim": 320}, "k_dim must be at most 256, got 320"),
        ("pages block kv_heads (kv dim)", [(4, 16, 2, 321)], {}, "321"),
    ],
)
def test_shapes_that_do_not_fit_are_named(layout, shapes, dims, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(layout).sizes(shapes, **dims)


def test_no_pages_is_a_size():
    shapes = CacheLayout(LAYOUTS[0]).shape(**{**SIZES, "pages": 0})
    assert shapes == ((0, 16, 2, 64), (0, 16, 2, 64))
    assert CacheLayout(LAYOUTS[0]).sizes(shapes).pages == 0
