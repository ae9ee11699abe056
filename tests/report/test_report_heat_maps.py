import math
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.text import Text
from PIL import Image

from otdd_flash.report.class_pictures import (
    draw_class_coupling,
    draw_class_distances,
    draw_joint_class_distances,
)
from otdd_flash.report.distance import heat_maps
from otdd_flash.report.figures.axis_names import spaced_ticks
from otdd_flash.report.figures.brackets import place_names
from otdd_flash.report.figures.cell_numbers import (
    cell_texts,
    ink_on,
    power_of_ten,
    relative_luminance,
    with_unit,
)
from otdd_flash.report.figures.page import DPI, fit, measure, new_figure
from otdd_flash.shown import shorten

WORDS = ("T-shirt/top", "0", "price in $ and $", "a class name that goes on and on", "two\nlines")


def names(count):
    return tuple(f"{WORDS[k % len(WORDS)]} {k}" for k in range(count))


def distances(size):
    points = torch.randn(size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cdist(points, points) ** 2


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, for measuring what stands on them."""
    saved = []
    save = heat_maps.save_picture

    def keep(figure, path):
        save(figure, path)
        saved.append(figure)

    monkeypatch.setattr(heat_maps, "save_picture", keep)
    return saved


def written(figure):
    """All texts but the colour bar's ticks beyond its end, which matplotlib never draws."""
    bar = figure.axes[1]
    low, high = bar.get_ylim()
    ticks = bar.get_yticklabels()
    hidden = {id(tick) for tick in ticks if not low <= tick.get_position()[1] <= high}
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    return [text for text in texts if id(text) not in hidden]


def overlap(first, second):
    a, b = first.get_window_extent(), second.get_window_extent()
    return a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("picture", "sizes"),
    [
        *(("distances", size) for size in ((1, 1), (1, 10), (40, 3), (300, 300))),
        *(("coupling", size) for size in ((2, 2), (10, 10), (2, 300))),
        *(("joint", size) for size in ((1, 1), (10, 10), (40, 3), (2, 300))),
    ],
)
def test_every_text_is_on_the_page_and_none_overlap(figures, tmp_path, sizes, picture):
    path, classes = tmp_path / "p.png", (names(sizes[0]), names(sizes[1]))
    datasets = ("FashionMNIST of the training split", "USPS")
    if picture == "distances":
        draw_class_distances(distances(sum(sizes)), classes, datasets, path)
    elif picture == "joint":
        classes = (*classes, names(3), classes[0])
        sizes = (*sizes, 3, sizes[0])
        draw_joint_class_distances(distances(sum(sizes)), classes, (*datasets, "a", "b"), path)
    else:
        mass = torch.rand(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        draw_class_coupling(mass / mass.sum(), classes, datasets, path)
    (figure,) = figures
    with Image.open(path) as image:
        image.verify()
        width, height = image.size
    assert image.format == "PNG"
    assert (width, height) == pytest.approx(DPI * figure.get_size_inches(), abs=1)
    assert max(width, height) < 13 * DPI

    axes = figure.axes[0]
    outer = [text for text in written(figure) if text not in axes.texts]
    for text in outer:
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert not any(overlap(a, b) for a, b in pairwise(labels))
    others = [text for text in outer if text.get_text() != figure.axes[1].get_ylabel()]
    assert not [(a, b) for k, a in enumerate(others) for b in others[:k] if overlap(a, b)]
    assert all(text.get_fontsize() >= 6 for text in outer)
    assert not any(text.get_parse_math() for text in outer if "$" in text.get_text())
    rows = len(axes.get_yticklabels())
    assert rows >= min(60, sizes[0] if picture == "coupling" else sum(sizes))


def test_classes_are_shown_in_the_order_asked_for(figures, tmp_path):
    classes, orders = (("a", "b"), ("c", "d", "e")), [[1, 0], [2, 0, 1]]
    table = torch.arange(25.0).reshape(5, 5)
    draw_class_distances(table, classes, ("x", "y"), tmp_path / "p.png", orders=orders)
    draw_class_coupling(table[:2, :3], classes, ("x", "y"), tmp_path / "p.png", orders=orders)
    rows = [1, 0, 4, 2, 3]
    for figure, expected, across in (
        (figures[0], table[rows][:, rows], "baecd"),
        (figures[1], 100 * table[[1, 0]][:, [2, 0, 1]], "ecd"),
    ):
        (image,) = figure.axes[0].get_images()
        np.testing.assert_array_equal(image.get_array(), expected.double())
        assert "".join(t.get_text() for t in figure.axes[0].get_xticklabels()) == across
        assert "".join(t.get_text() for t in figure.axes[0].get_yticklabels())[:2] == "ba"


def test_cells_show_the_values_and_hide_empty_ones(figures, tmp_path):
    mass = torch.tensor([[0.5, 0.0], [0.1, 0.4]])
    draw_class_coupling(mass, (("a", "b"), ("c", "d")), ("x", "y"), tmp_path / "p.png")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["50.0", "", "10.0", "40.0"]


@pytest.mark.parametrize("values", [[3.0, -1.0], [-4.0, -1.0], [2.0, 1.0], [0.0, 0.0]], ids=str)
def test_colours_of_signed_values_diverge_from_white_at_0(figures, tmp_path, values):
    heat_maps.heat_map(
        torch.tensor([values, [math.nan, 0.0]]),
        *(("a", "b"), ("c", "d"), tmp_path / "p.png"),
        title="gains",
        value_label="%",
        row_groups=[("sources", 2)],
        column_groups=[("targets", 2)],
        signed=True,
    )
    (image,) = figures[0].axes[0].get_images()
    assert image.norm.vmin == -image.norm.vmax < 0
    middle, up, down = (image.to_rgba(level * image.norm.vmax)[:3] for level in (0.0, 1.0, -1.0))
    assert min(middle) > 0.94
    # Blue above 0 and red below, whatever values there are.
    assert up[2] > up[0]
    assert down[0] > down[2]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("values", ["ordinary", "zero", "not finite", "negative", "tiny", "huge"])
def test_numbers_keep_contrast_with_their_cells(figures, tmp_path, values):
    table = distances(8)
    if values == "not finite":
        table[0, 1], table[1, 0] = float("nan"), float("inf")
    factors = {"zero": 0.0, "negative": -1.0, "tiny": 1e-30, "huge": 1e30}
    table = table * factors.get(values, 1.0)
    draw_class_distances(table, (names(4), names(4)), ("x", "y"), tmp_path / "p.png")
    axes = figures[0].axes[0]
    (image,) = axes.get_images()
    colors = image.to_rgba(image.get_array()).reshape(-1, 4)
    assert len(axes.texts) == len(colors) == 64
    for text, color in zip(axes.texts, colors, strict=True):
        inks = relative_luminance(matplotlib.colors.to_rgb(text.get_color()))
        bright, dark = sorted((inks, relative_luminance(tuple(color))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_ink_contrasts_with_any_colour():
    for color in np.random.default_rng(0).random((2000, 3)):
        lights = (relative_luminance(tuple(color)), 1.0 if ink_on(tuple(color)) == "white" else 0.0)
        assert (max(lights) + 0.05) / (min(lights) + 0.05) >= 4.5


def test_a_matrix_that_does_not_match_its_names_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot have"):
        draw_class_coupling(torch.ones(2, 3), (("a", "b"), ("c",)), ("x", "y"), tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_dropped_names_leave_room_across_groups():
    assert spaced_ticks([3, 3], 1) == (0, 1, 2, 3, 4, 5)
    assert spaced_ticks([1, 9], 4) == (0, 5, 9)
    assert spaced_ticks([10, 10], 4) == (0, 4, 10, 14, 18)
    for sizes, step in (([300, 300], 4), ([2, 300], 5), ([1, 1, 1000], 20)):
        assert min(np.diff(spaced_ticks(sizes, step))) >= step


def test_names_of_narrow_brackets_make_way():
    figure = new_figure()
    texts, centres = place_names(figure, ["source: a", "target: b"], [(0, 0.1), (0.1, 5)], 5.0)
    widths = [measure(figure, text, 10.0, fontweight="bold")[0] for text in texts]
    assert texts == ["source: a", "target: b"]
    assert centres[0] - widths[0] / 2 >= 0
    assert centres[0] + widths[0] / 2 < centres[1] - widths[1] / 2
    texts, _ = place_names(figure, ["x" * 200, "target: b"], [(0, 2), (2, 4)], 4.0)
    assert texts[0].endswith("…")
    assert texts[1] == "target: b"


@pytest.mark.parametrize(
    ("largest", "exponent", "text"),
    [
        (159.4, 0, "159"),
        (6.13, 0, "6.13"),
        (0.0123, 0, "0.0123"),
        (54321.0, 3, "54.3"),
        (1.2e-5, -6, "12.0"),
        (0.0, 0, "0"),
    ],
)
def test_numbers_have_three_digits_and_a_named_unit(largest, exponent, text):
    values = np.array([[largest, 0.0]])
    assert power_of_ten(values) == exponent
    assert cell_texts(values / 10.0**exponent) == [[text, "0"]]
    assert with_unit("W", -6) == "W (× 10⁻⁶)"
    assert with_unit("W", 0) == "W"


def test_long_names_end_in_an_ellipsis():
    assert shorten("Ankle boot", 10) == "Ankle boot"
    assert shorten("Ankle boots", 7) == "Ankle…"
    assert shorten(" two\nlines\x00 ", 18) == "two lines\\x00"
    assert fit("abcdef", 3, len) == "ab…"
    assert fit("abcdef", 0, len) == "…"
