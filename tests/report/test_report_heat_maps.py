"""Tables of classes as pictures: names, orders, colours and numbers in cells."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from picture_checks import check_apart, check_on_page

from otdd_flash.report.figures import heat_maps
from otdd_flash.report.figures.class_pictures import (
    draw_class_coupling,
    draw_class_distances,
    draw_joint_class_distances,
)
from otdd_flash.report.figures.heat_maps import (
    cell_texts,
    ink_on,
    place_names,
    power_of_ten,
    relative_luminance,
    spaced_ticks,
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


def written(figure):
    """All texts but the colour bar's ticks beyond its end, which matplotlib never draws."""
    from matplotlib.text import Text

    bar = figure.axes[1]
    low, high = bar.get_ylim()
    ticks = bar.get_yticklabels()
    hidden = {id(tick) for tick in ticks if not low <= tick.get_position()[1] <= high}
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    return [text for text in texts if id(text) not in hidden]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("picture", "sizes"),
    [
        ("distances", (1, 10)),
        ("distances", (1, 1)),
        ("distances", (40, 3)),
        ("distances", (100, 100)),
        ("coupling", (2, 120)),
        ("joint", (1, 1)),
        ("joint", (2, 40)),
    ],
)
def test_every_text_is_on_the_page_and_none_overlap(figures, sizes, picture):
    classes = names(sizes[0]), names(sizes[1])
    datasets = ("FashionMNIST of the training split", "USPS")
    if picture == "distances":
        draw_class_distances(distances(sum(sizes)), classes, datasets, None)
    elif picture == "joint":
        classes = (*classes, names(3), classes[0])
        sizes = (*sizes, 3, sizes[0])
        draw_joint_class_distances(distances(sum(sizes)), classes, (*datasets, "a", "b"), None)
    else:
        mass = torch.rand(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        draw_class_coupling(mass / mass.sum(), classes, datasets, None)
    (figure,) = figures
    figure.draw_without_rendering()
    assert max(figure.get_size_inches()) < 13
    axes = figure.axes[0]
    outer = [text for text in written(figure) if text not in axes.texts]
    check_on_page(figure, outer)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for pair in pairwise(labels):
            check_apart(pair)
    check_apart(text for text in outer if text.get_text() != figure.axes[1].get_ylabel())
    assert all(text.get_fontsize() >= 6 for text in outer)
    assert not any(text.get_parse_math() for text in outer if "$" in text.get_text())
    rows = len(axes.get_yticklabels())
    assert rows >= min(60, sizes[0] if picture == "coupling" else sum(sizes))


def test_a_picture_is_a_png_of_the_size_of_its_page(tmp_path):
    from PIL import Image

    path = tmp_path / "p.png"
    draw_class_distances(distances(4), (names(2), names(2)), ("x", "y"), path)
    with Image.open(path) as image:
        image.verify()
    assert image.format == "PNG"
    assert max(image.size) < 13 * DPI
    with pytest.raises(ValueError, match="cannot have"):
        draw_class_coupling(torch.ones(2, 3), (("a", "b"), ("c",)), ("x", "y"), tmp_path / "q.png")
    assert list(tmp_path.iterdir()) == [path]


def test_cells_show_classes_in_the_order_asked_for_and_hide_empty_ones(figures):
    classes, orders = (("a", "b"), ("c", "d", "e")), [[1, 0], [2, 0, 1]]
    table = torch.arange(25.0).reshape(5, 5)
    draw_class_distances(table, classes, ("x", "y"), None, orders=orders)
    draw_class_coupling(table[:2, :3], classes, ("x", "y"), None, orders=orders)
    rows = [1, 0, 4, 2, 3]
    for figure, expected, across in (
        (figures[0], table[rows][:, rows], "baecd"),
        (figures[1], 100 * table[[1, 0]][:, [2, 0, 1]], "ecd"),
    ):
        (image,) = figure.axes[0].get_images()
        np.testing.assert_array_equal(image.get_array(), expected.double())
        assert "".join(t.get_text() for t in figure.axes[0].get_xticklabels()) == across
        assert "".join(t.get_text() for t in figure.axes[0].get_yticklabels())[:2] == "ba"
    mass = torch.tensor([[0.5, 0.0], [0.1, 0.4]])
    draw_class_coupling(mass, (("a", "b"), ("c", "d")), ("x", "y"), None)
    assert [text.get_text() for text in figures[2].axes[0].texts] == ["50.0", "", "10.0", "40.0"]


@pytest.mark.slow
def test_colours_of_signed_values_diverge_from_white_at_0(figures):
    for values in ([3.0, -1.0], [-4.0, -1.0], [2.0, 1.0], [0.0, 0.0]):
        heat_maps.heat_map(
            torch.tensor([values, [math.nan, 0.0]]),
            *(("a", "b"), ("c", "d"), None),
            title="gains",
            value_label="%",
            row_groups=[("sources", 2)],
            column_groups=[("targets", 2)],
            signed=True,
        )
        (image,) = figures[-1].axes[0].get_images()
        assert image.norm.vmin == -image.norm.vmax < 0
        middle, up, down = (image.to_rgba(level * image.norm.vmax)[:3] for level in (0.0, 1, -1))
        assert min(middle) > 0.94, values
        # Blue above 0 and red below, whatever values there are.
        assert up[2] > up[0], values
        assert down[0] > down[2], values


def contrast(one, other):
    bright, dark = sorted((one, other), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("values", ["not finite", "ordinary", "zero", "negative", "tiny", "huge"])
def test_numbers_keep_contrast_with_their_cells(figures, values):
    from matplotlib.colors import to_rgb

    table = distances(4)
    if values == "not finite":
        table[0, 1], table[1, 0] = float("nan"), float("inf")
    factors = {"zero": 0.0, "negative": -1.0, "tiny": 1e-30, "huge": 1e30}
    table = table * factors.get(values, 1.0)
    draw_class_distances(table, (names(2), names(2)), ("x", "y"), None)
    axes = figures[0].axes[0]
    (image,) = axes.get_images()
    colors = image.to_rgba(image.get_array()).reshape(-1, 4)
    assert len(axes.texts) == len(colors) == 16
    for text, color in zip(axes.texts, colors, strict=True):
        inks = relative_luminance(to_rgb(text.get_color()))
        assert contrast(inks, relative_luminance(tuple(color))) >= 4.5
    for color in map(tuple, np.random.default_rng(0).random((200, 3))):
        ink = 1.0 if ink_on(color) == "white" else 0.0
        assert contrast(relative_luminance(color), ink) >= 4.5


def test_names_make_way_for_each_other():
    assert spaced_ticks([3, 3], 1) == (0, 1, 2, 3, 4, 5)
    assert spaced_ticks([1, 9], 4) == (0, 5, 9)
    assert spaced_ticks([10, 10], 4) == (0, 4, 10, 14, 18)
    for sizes, step in (([300, 300], 4), ([2, 300], 5), ([1, 1, 1000], 20)):
        assert min(np.diff(spaced_ticks(sizes, step))) >= step
    figure = new_figure()
    texts, centres = place_names(figure, ["source: a", "target: b"], [(0, 0.1), (0.1, 5)], 5.0)
    widths = [measure(figure, text, 10.0, fontweight="bold")[0] for text in texts]
    assert texts == ["source: a", "target: b"]
    assert centres[0] - widths[0] / 2 >= 0
    assert centres[0] + widths[0] / 2 < centres[1] - widths[1] / 2
    texts, _ = place_names(figure, ["x" * 200, "target: b"], [(0, 2), (2, 4)], 4.0)
    assert texts[0].endswith("…")
    assert texts[1] == "target: b"
    for name, length, shown in (
        ("Ankle boot", 10, "Ankle boot"),
        ("Ankle boots", 7, "Ankle…"),
        (" two\nlines\x00 ", 18, "two lines\\x00"),
    ):
        assert shorten(name, length) == shown
    assert [fit("abcdef", width, len) for width in (3, 0)] == ["ab…", "…"]


def test_numbers_have_three_digits_and_a_named_unit():
    for largest, exponent, text in (
        (159.4, 0, "159"),
        (6.13, 0, "6.13"),
        (0.0123, 0, "0.0123"),
        (54321.0, 3, "54.3"),
        (1.2e-5, -6, "12.0"),
        (0.0, 0, "0"),
    ):
        values = np.array([[largest, 0.0]])
        assert power_of_ten(values) == exponent, largest
        assert cell_texts(values / 10.0**exponent) == [[text, "0"]]
    assert [with_unit("W", power) for power in (-6, 0)] == ["W (× 10⁻⁶)", "W"]
