"""Tables of classes as pictures: orders, names and their fonts, colours and numbers in cells."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from picture_checks import check_apart, check_on_page

from otdd_flash.errors import DataNotice
from otdd_flash.report import page as fonts
from otdd_flash.report.distance import draw_class_coupling
from otdd_flash.report.heat_maps import (
    BRACKET_POINTS,
    LARGEST,
    SMALLEST,
    Group,
    _name_cells,
    _place_names,
    cell_texts,
    class_orders,
    draw_class_distances,
    heat_map,
    power_of_ten,
    relative_luminance,
    with_unit,
)
from otdd_flash.report.page import DPI, measure, new_figure, own_style, save_picture

# Orders of classes.


def line(positions):
    """Squared distances between points of a line."""
    points = torch.tensor(positions, dtype=torch.float64).unsqueeze(1)
    return torch.cdist(points, points) ** 2


def test_like_stands_beside_like_and_both_datasets_are_ordered_alike():
    """Every class has one place in its dataset."""
    found = class_orders(line([3.0, 1.0, 4.0, 1.5, 5.0, 9.0]), (2, 3, 1), "hierarchical")
    assert [sorted(places) for places in found] == [[0, 1], [0, 1, 2], [0]]
    source, target = [5.0, 1.0, 4.2, 0.0, 2.5], [0.1, 2.6, 4.9, 1.1, 4.3]
    first, second = class_orders(line(source + target), [5, 5], "hierarchical")
    pairs = [(source[i], target[j]) for i, j in zip(first, second, strict=True)]
    assert all(abs(one - two) < 0.2 for one, two in pairs)
    # Rounding and equal classes.
    table = line([0.0, 0.0, 1.0, 1.0])
    table[0, 2] += 1e-9
    table[0, 0] = -1e-9
    (places,) = class_orders(table, [4], "hierarchical")
    assert sorted(places[:2]) in ([0, 1], [2, 3])
    table = line([0.0, 3.0, 1.0, 2.2]) + line([0.0, 0.5, 2.0, 0.1])
    (places,) = class_orders(table, [4], "hierarchical")

    def length(order):
        return sum(float(table[i, j].sqrt()) for i, j in itertools.pairwise(order))

    # No other order has nearer neighbours.
    assert length(places) == pytest.approx(min(map(length, itertools.permutations(range(4)))))


# Heat maps.

WORDS = ("T-shirt/top", "0", "price in $ and $", "a class name that goes on and on", "two\nlines")


def given(classes):
    """The classes of some datasets in the order given."""
    return [range(len(names)) for names in classes]


def names(count):
    return tuple(f"{WORDS[k % len(WORDS)]} {k}" for k in range(count))


def draw_classes(table, classes, datasets=("x", "y"), orders=None):
    orders = given(classes) if orders is None else orders
    return draw_class_distances(table, classes, datasets, title="Distances", orders=orders)


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
        ("distances", (100, 100)),
        ("coupling", (2, 120)),
        ("joint", (1, 1)),
        ("joint", (2, 40)),
    ],
)
@pytest.mark.usefixtures("styled")
def test_every_text_is_on_the_page_and_none_overlap(sizes, picture):
    classes = names(sizes[0]), names(sizes[1])
    datasets = ("FashionMNIST of the training split", "USPS")
    if picture == "distances":
        figure = draw_classes(distances(sum(sizes)), classes, datasets)
    elif picture == "joint":
        classes = (*classes, names(3), classes[0])
        sizes = (*sizes, 3, sizes[0])
        figure = draw_classes(distances(sum(sizes)), classes, (*datasets, "a", "b"))
    else:
        mass = torch.rand(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        orders = given(classes)
        figure = draw_class_coupling(mass / mass.sum(), classes, datasets, orders=orders)
    figure.draw_without_rendering()
    assert max(figure.get_size_inches()) < 13
    axes = figure.axes[0]
    for each in figure.axes:
        corners = each.get_position(original=True).get_points()
        assert ((corners > 0) & (corners < 1)).all()
    outer = [text for text in written(figure) if text not in axes.texts]
    check_on_page(figure, outer)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for pair in itertools.pairwise(labels):
            check_apart(pair)
    check_apart(text for text in outer if text.get_text() != figure.axes[1].get_ylabel())
    assert all(text.get_fontsize() >= 6 for text in outer)
    assert not any(text.get_parse_math() for text in outer if "$" in text.get_text())
    rows = len(axes.get_yticklabels())
    assert rows >= min(60, sizes[0] if picture == "coupling" else sum(sizes))


@pytest.mark.usefixtures("styled")
def test_cells_show_classes_in_the_order_asked_for_and_hide_empty_ones():
    classes, orders = (("a", "b"), ("c", "d", "e")), [[1, 0], [2, 0, 1]]
    table = torch.arange(25.0).reshape(5, 5)
    whole = draw_classes(table, classes, orders=orders)
    coupling = draw_class_coupling(table[:2, :3], classes, ("x", "y"), orders=orders)
    rows = [1, 0, 4, 2, 3]
    for figure, expected, across in (
        (whole, table[rows][:, rows], "baecd"),
        (coupling, 100 * table[[1, 0]][:, [2, 0, 1]], "ecd"),
    ):
        (image,) = figure.axes[0].get_images()
        np.testing.assert_array_equal(image.get_array(), expected.double())
        assert "".join(t.get_text() for t in figure.axes[0].get_xticklabels()) == across
        assert "".join(t.get_text() for t in figure.axes[0].get_yticklabels())[:2] == "ba"
    mass = torch.tensor([[0.5, 0.0], [0.1, 0.4]])
    classes = ("a", "b"), ("c", "d")
    figure = draw_class_coupling(mass, classes, ("x", "y"), orders=given(classes))
    assert [text.get_text() for text in figure.axes[0].texts] == ["50.0", "", "10.0", "40.0"]


def test_names_of_narrow_cells_are_smaller_and_at_the_smallest_some_are_left_out():
    with own_style():
        for length, points, count in ((9.0, LARGEST, 40), (5.0, 7.2, 40), (2.0, SMALLEST, 14)):
            axis = new_figure().add_subplot().yaxis
            _name_cells(axis, [Group("all", names(40), "0.5")], length)
            labels = axis.get_ticklabels()
            assert [label.get_fontsize() for label in labels] == [pytest.approx(points)] * count


def test_names_of_narrow_groups_move_aside_and_none_leaves_the_axis():
    groups = [Group(name, ("a",), "0.5") for name in ("a name", "another name", "one more")]
    with own_style():
        axes = new_figure().add_subplot()
        for edges in ([0.0, 0.1, 0.2, 6.0], [0.0, 5.8, 5.9, 6.0], [0.0, 2.0, 4.0, 6.0]):
            texts, centres = _place_names(axes, groups, np.array(edges))
            assert texts == [group.name for group in groups]
            bold = {"fontweight": "bold"}
            widths = [measure(axes.figure, text, BRACKET_POINTS, **bold)[0] for text in texts]
            ends = [
                (at - wide / 2, at + wide / 2) for at, wide in zip(centres, widths, strict=True)
            ]
            assert ends[0][0] > 0
            assert ends[-1][1] < 6
            assert all(left[1] < right[0] for left, right in itertools.pairwise(ends))
    assert centres == [1, 3, 5]


@pytest.mark.slow
@pytest.mark.usefixtures("styled")
def test_colours_of_signed_values_diverge_from_white_at_0():
    for values in ([3.0, -1.0], [-4.0, -1.0], [0.0, 0.0]):
        figure = heat_map(
            torch.tensor([values, [math.nan, 0.0]]),
            [Group("sources", ("a", "b"), "k")],
            [Group("targets", ("c", "d"), "k")],
            title="gains",
            value_label="%",
            signed=True,
        )
        (image,) = figure.axes[0].get_images()
        assert image.norm.vmin == -image.norm.vmax < 0
        middle, up, down = (image.to_rgba(level * image.norm.vmax)[:3] for level in (0.0, 1, -1))
        assert min(middle) > 0.94, values
        # Blue above 0 and red below, whatever values there are.
        assert up[2] > up[0], values
        assert down[0] > down[2], values


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("factor", [1.0, 0.0, -1.0, 1e-30, 1e30])
@pytest.mark.usefixtures("styled")
def test_numbers_keep_contrast_with_their_cells(factor):
    from matplotlib.colors import to_rgb

    table = distances(4)
    if factor == 1:
        table[0, 1], table[1, 0] = float("nan"), float("inf")
    axes = draw_classes(factor * table, (names(2), names(2))).axes[0]
    (image,) = axes.get_images()
    colors = image.to_rgba(image.get_array()).reshape(-1, 4)
    assert len(axes.texts) == len(colors) == 16
    for text, color in zip(axes.texts, colors, strict=True):
        pair = relative_luminance(to_rgb(text.get_color())), relative_luminance(tuple(color))
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5


def test_numbers_have_three_digits_and_a_named_unit():
    for largest, exponent, text in (
        (159.4, 0, "159"),
        (0.0123, 0, "0.0123"),
        (54321.0, 3, "54.3"),
        (1.2e-5, -6, "12.0"),
        (0.0, 0, "0"),
    ):
        values = np.array([[largest, 0.0]])
        assert power_of_ten(values) == exponent, largest
        assert cell_texts(values / 10.0**exponent) == [[text, "0"]]
    assert [with_unit("W", power) for power in (-6, 0)] == ["W (× 10⁻⁶)", "W"]


# Names in any script: a font that has them, or one notice of what none has.

# Inner Mongolian and cuneiform, which the test's fonts lack; Greek and Arabic, which they have.
LACKING, PRESENT = "ᠠ𒀀", "αب"


def test_a_font_that_has_the_characters_is_found_or_their_lack_told_of_once(tmp_path, monkeypatch):
    have = {fonts.DEFAULT: set(map(ord, "abc" + PRESENT))}
    fonts._for_characters.cache_clear()
    monkeypatch.setattr(fonts, "_installed", lambda: tuple(have))
    monkeypatch.setattr(fonts, "_characters_of", lambda name: frozenset(have[name]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fonts.notice_missing_glyphs(["abc", f"a{LACKING}", LACKING[0]])
        figure = new_figure(2, 1)
        with own_style([LACKING]):
            measure(figure, LACKING, 9)
            figure.text(0, 0, LACKING)
            save_picture(figure, tmp_path / "names.png")
    assert [entry.category for entry in caught] == [DataNotice]
    assert f"{LACKING[0]} {LACKING[1]}, which pictures show as boxes" in str(caught[0].message)
    have |= {"Useless": {1, 2}, "Mongolian": {ord(LACKING[0])}, "Cuneiform": {ord(LACKING[1])}}
    fonts._for_characters.cache_clear()
    assert fonts.families(f"a{PRESENT}") == [fonts.DEFAULT]
    assert fonts.families(f"a{LACKING}") == [fonts.DEFAULT, "Mongolian", "Cuneiform"]
    with own_style([LACKING[1]]):
        assert new_figure().text(0, 0, "a").get_fontfamily() == [fonts.DEFAULT, "Cuneiform"]
    fonts._for_characters.cache_clear()


def test_a_picture_is_a_png_of_the_size_of_its_page_in_a_font_that_is_there(tmp_path):
    from PIL import Image

    path = tmp_path / "p.png"
    save_picture(draw_classes(distances(4), (names(2), names(2))), path)
    with Image.open(path) as image:
        image.verify()
    assert image.format == "PNG"
    assert max(image.size) < 13 * DPI
    known = fonts._characters_of(fonts.DEFAULT)
    assert {ord(character) for character in "aZß" + PRESENT} <= known
    assert not {ord(character) for character in LACKING} & known
    assert fonts.DEFAULT in fonts._installed()


def test_a_page_grows_around_axes_that_keep_their_sizes():
    with own_style():
        figure = new_figure()
        figure.set_size_inches(4.0, 2.0)
        axes = figure.add_axes((0.25, 0.25, 0.5, 0.5))
        axes.set_ylabel("far " * 40)
        fonts.grow_page(figure)
        width, height = figure.get_size_inches()
        assert height > 4
        box = axes.get_position(original=True)
        assert (box.width * width, box.height * height) == pytest.approx((2.0, 1.0))
        check_on_page(figure, [axes.yaxis.label])
