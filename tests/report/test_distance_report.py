"""What is written and printed of a distance: the table, all files, the picture of both datasets."""

import csv
import io
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from picture_checks import check_apart, check_on_page
from rich.console import Console

import otdd_flash as otdd
from otdd_flash.errors import InputError, MissingFileNotice
from otdd_flash.labels.table import NearestClass
from otdd_flash.report import distance as writing
from otdd_flash.report import page as fonts
from otdd_flash.report.distance import (
    MOST_ROWS,
    Move,
    nearest_table,
    projection,
    strongest_moves,
    summary_table,
    write_contributions,
    write_report,
)
from otdd_flash.report.page import save_picture
from otdd_flash.report.planes import fit_plane
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import interval

# Tables on a terminal.

SUMMARY = {
    "value": 12.345678,
    "bounds": [12.3401, 12.3512],
    "epsilon": 0.1,
    "marginal_error": 7e-4,
    "tolerance": 1e-3,
    "iterations": 212,
    "converged": True,
    "stopped_by": "tolerance",
    "seconds": {"load": 0.25, "extract": 1.5, "class_distances": 0.5, "solve": 12.25, "report": 1},
    "n": 5000,
    "m": 7291,
    "d": 784,
    "classes": {"source": 10, "target": ["a", "b", "c"]},
    "labels": "gaussian",
    "device": "cpu",
    "backend": "torch",
    "precision": "fast",
    "source": "MNIST [train]",
    "target": "USPS",
}
FACTS = [
    *("MNIST [train] → USPS", "12.346 [12.340, 12.352] (solver bounds)", "gaussian"),
    *("5000 × 7291, 784 features", "10 × 3", "0.0007 ≤ 0.001", "212", "16 (load 0.25"),
    *("solve 12", "cpu, torch, fast", "not measured; subsample=50 gives an interval"),
]
LATE = {"marginal_error": 0.02}
NEEDS = "not measured; subsamples need more rows"
GIVES = "not measured; subsample=50 gives an interval"
SAMPLED = {"lower": 2.751, "upper": 9.003, "level": 0.95, "count": 50, "size": [22, 20]}


def printed(table, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("changes", "there", "missing"),
    [
        (
            {},
            FACTS,
            ["NOT CONVERGED", "stopped by"],
        ),
        (
            {"converged": False, "stopped_by": "max_iterations", **LATE},
            ["NOT CONVERGED", "stopped by max_iterations", "0.02 > 0.001"],
            ["yes"],
        ),
        (
            {"stopped_by": "bound_width", "tolerance": None, **LATE},
            ["yes, stopped by bound_width", "0.02"],
            ["> 0.001"],
        ),
        (
            {"stopped_by": "rounding", "marginal_error": 0.0019, "tolerance": 0.0021},
            ["yes, stopped by rounding", "0.0019 ≤ 0.0021"],
            ["NOT"],
        ),
        (
            {"converged": False, "stopped_by": "schedule", "schedule": "geomloss"},
            ["the value is geomloss's, the solver bounds hold"],
            ["only solver bounds"],
        ),
        # Where sampling error was not measured.
        ({"n": 20}, [f"{NEEDS}, over two of each class"], []),
        ({"n": 21}, [GIVES], []),
        ({"n": 20, "labels": "none"}, [GIVES], []),
        ({"n": 2, "labels": "none"}, [NEEDS], []),
        ({"value": 0.0, "bounds": [0.0, 0.0]}, [], ["sampling error"]),
        (
            {"subsample": {**SAMPLED, "identical": False}},
            ["12.3 [2.7, 9.1] (50 subsamples of 22 × 20)"],
            ["sampling error"],
        ),
    ],
)
def test_the_table_says_what_matters_and_what_stopped_a_solve(changes, there, missing):
    text = printed(summary_table(SUMMARY | changes))
    assert all(fact in text for fact in there), text
    assert not any(fact in text for fact in missing), text


def test_an_interval_shows_the_digits_its_bounds_support_and_contains_them():
    for numbers, text in (
        ((0.0, 0.0, 0.0), "0 [0, 0]"),
        ((2.5, 2.5, 2.5), "2.50000 [2.50000, 2.50000]"),
        ((1.5e-9, 1.4e-9, 1.6e-9), "1.50e-9 [1.40e-9, 1.60e-9]"),
        ((1e-4, -1e-7, 2e-4), "0.000100 [-0.000001, 0.000200]"),
        ((123456.7, 123450.2, 123460.9), "123457 [123450, 123461]"),
        ((math.nan, 0.0, math.inf), "nan [0, inf]"),
        ((2.0, 1.23456789, math.inf), "2.00000 [1.23456, inf]"),
        ((-math.inf, -math.inf, 1.23456123), "-inf [-inf, 1.23457]"),
    ):
        assert interval(*numbers) == text
    draw = random.Random(0)
    for _ in range(500):
        value = draw.uniform(-1, 1) * 10.0 ** draw.uniform(-12, 12)
        width = abs(value) * 10.0 ** draw.uniform(-12, 2)
        lower, upper = value - draw.random() * width, value + draw.random() * width
        low, high = interval(value, lower, upper).split(" ", 1)[1].strip("[]").split(", ")
        assert float(low) <= lower
        assert upper <= float(high)
        slack = 2e-5 * max(abs(lower), abs(upper))
        assert float(high) - float(low) <= 1.5 * (upper - lower) + slack


def test_nearest_classes_are_shown_side_by_side_and_many_left_to_the_file():
    def rows(sources, targets):
        return [
            NearestClass(side, f"{side[0]} {k}", "cat, [red]", k / 3)
            for side, count in (("source", sources), ("target", targets))
            for k in range(count)
        ]

    text = printed(nearest_table(rows(MOST_ROWS + 5, 3)))
    for fact in ("source", "nearest target", "target", "nearest source", "cat, [red]", "0.3333"):
        assert fact in text
    (line,) = [line for line in text.splitlines() if "t 1" in line]
    assert "s 1" in line
    assert f"s {MOST_ROWS - 1} " in text
    assert f"s {MOST_ROWS} " not in text
    assert "5 more classes in nearest_classes.csv" in text
    # Long names fit the terminal.
    text = printed(nearest_table([NearestClass("source", "x" * 200, "y" * 200, 1.0)]), 80)
    assert max(map(len, text.splitlines())) <= 80


# All files, whatever style, backend and fonts there are.

COUPLING = {"class_coupling.csv", "class_coupling.png"}
ALL = {"class_distances.csv", "class_distances.png", "nearest_classes.csv", *COUPLING}
ALL |= {"projection.png"}


def result(names=(("a,b", "c"), ("a,b", "d", "e")), points=None, labels="means"):
    """A distance between datasets of these classes, each at one place of a line."""
    points = torch.arange(sum(map(len, names))) if points is None else torch.tensor(points)
    sides = [
        LabeledSamples(part[:, None].float(), torch.arange(len(part)), classes)
        for part, classes in zip(points.split([len(one) for one in names]), names, strict=True)
    ]
    return otdd.dataset_distance(*sides, labels=labels, epsilon=1.0)


def listing(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_report_has_all_its_files_whatever_the_users_style(tmp_path):
    """Which may ask for LaTeX, and is afterwards what it was."""
    import matplotlib

    given = result()
    written = write_report(given, tmp_path / "run").written
    assert {path.name for path in written} == listing(tmp_path / "run") == ALL
    with (tmp_path / "run" / "class_distances.csv").open(newline="") as lines:
        header, *body = csv.reader(lines)
    assert header == ["class", "source:a,b", "source:c", "target:a,b", "target:d", "target:e"]
    assert [
        [float(cell) for cell in row[1:]] for row in body
    ] == given.class_distances.full.tolist()
    nearest = (tmp_path / "run" / "nearest_classes.csv").read_text().splitlines()
    assert nearest[0] == "side,class,nearest,squared_distance"
    assert nearest[1:3] == ['source,"a,b","a,b",4.0', 'source,c,"a,b",1.0']
    assert nearest[3:] == ['target,"a,b",c,1.0', "target,d,c,4.0", "target,e,c,9.0"]
    with (tmp_path / "run" / "class_coupling.csv").open(newline="") as lines:
        assert [row[0] for row in csv.reader(lines)] == ["source\\target", "a,b", "c"]
    theirs = {"text.usetex": True, "font.size": 30.0, "savefig.bbox": "tight"}
    with matplotlib.rc_context(theirs):
        report = write_report(given, tmp_path / "styled")
        assert {key: matplotlib.rcParams[key] for key in theirs} == theirs
    for path in report.written:
        assert path.read_bytes() == (tmp_path / "run" / path.name).read_bytes(), path.name
    # Without labels or class distances there are fewer files.
    bare = otdd.dataset_distance(torch.eye(3), torch.ones(4, 3), labels="none", epsilon=1.0)
    written = write_report(bare, tmp_path / "unlabelled").written
    assert [path.name for path in written] == ["projection.png"]
    write_report(result(labels="none"), tmp_path / "none")
    assert listing(tmp_path / "none") == {"projection.png", *COUPLING}


@pytest.mark.parametrize("content", ["table", "none"])
def test_a_report_of_tables_has_no_pictures_and_one_of_nothing_no_files(content, tmp_path):
    written = write_report(result(), tmp_path / "run", content=content).written
    tables = {name for name in ALL if name.endswith(".csv")}
    assert {path.name for path in written} == (tables if content == "table" else set())


@pytest.mark.slow
def test_fonts_that_cannot_be_read_cost_no_table(tmp_path, monkeypatch):
    def unreadable(*_):
        raise OSError("no fonts")

    monkeypatch.setattr(fonts, "_for_characters", unreadable)
    with pytest.warns(MissingFileNotice, match="no fonts"):
        report = write_report(result(), tmp_path)
    tables = {name for name in ALL if name.endswith(".csv")}
    assert tables <= {path.name for path in report.written}


BACKENDS = """
import os, sys
from otdd_flash.report.page import new_figure, save_picture
assert "matplotlib" not in sys.modules
for named in ("banana", "module://nosuch.inline", "svg"):
    if not (pid := os.fork()):
        os.environ["MPLBACKEND"] = named
        save_picture(new_figure(), f"{named[:3]}.png")
        import matplotlib
        print(named, matplotlib.rcParams["backend"], flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, named
"""


@pytest.mark.slow
def test_pictures_are_drawn_whatever_backend_the_environment_names(tmp_path):
    """And one that there is stays the user's."""
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    command, pipes = [sys.executable, "-c", BACKENDS], {"capture_output": True, "text": True}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, **pipes, check=False)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert found["svg"] == "svg"
    assert found["module://nosuch.inline"].startswith("module")
    assert listing(tmp_path) == {"ban.png", "mod.png", "svg.png"}
    assert all(path.stat().st_size for path in tmp_path.iterdir())


def test_pictures_are_in_the_order_asked_for_and_tables_are_not(tmp_path, monkeypatch):
    drawn = {}
    for name in ("draw_class_distances", "draw_class_coupling"):
        monkeypatch.setattr(
            writing, name, lambda *_, name=name, orders, **__: drawn.setdefault(name, orders)
        )
    monkeypatch.setattr(writing, "projection", lambda *_, **__: None)
    monkeypatch.setattr(fonts, "save_picture", lambda *_: None)
    given = result((("a", "b", "c"), ("d", "e", "f")), [5.0, 0.0, 4.0, 0.5, 4.5, 1.0])
    write_report(given, tmp_path, order="hierarchical")
    assert drawn["draw_class_distances"] in ([[1, 2, 0], [0, 2, 1]], [[0, 2, 1], [1, 2, 0]])
    assert drawn["draw_class_coupling"] == drawn["draw_class_distances"]
    assert (tmp_path / "class_distances.csv").read_text().startswith("class,source:a,source:b,")
    with pytest.raises(InputError, match=r"unknown report.order 'best'; choose one of: given"):
        write_report(given, tmp_path, order="best")


# projection.png: both datasets in their principal plane, and what moves where.


def clusters(classes, d, seed=0, name="samples"):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(6)
    features = 3 * torch.randn(classes, d, generator=draw)[labels]
    features = features + torch.randn(len(labels), d, generator=draw)
    return LabeledSamples(features, labels, tuple(f"class {k}" for k in range(classes)), name=name)


def diagonal(rows, columns):
    table = torch.zeros(rows, columns, dtype=torch.float64)
    table[torch.arange(rows), torch.arange(rows) % columns] = 1.0 / rows
    return table


def class_labels(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_path_effects()]


def arrows(figure):
    from matplotlib.patches import FancyArrowPatch

    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "d"), [((3, 2), 1), ((1, 1), 5), ((60, 60), 8)])
@pytest.mark.usefixtures("styled")
def test_labels_of_pictures_are_apart(classes, d):
    source, target = clusters(classes[0], d, name="$a$ and $b"), clusters(classes[1], d, 1)
    figure = projection(source, target, diagonal(*classes), seed=0)
    axes = figure.axes[0]
    legend = axes.get_legend().get_texts()
    texts = [*axes.texts, *legend, axes.xaxis.label, axes._left_title]
    check_on_page(figure, [*texts, axes.yaxis.label])
    check_apart([*texts, axes.yaxis.label])
    assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())
    expected = sum(classes) if max(classes) <= 20 else 2 * writing.MOVES_OF_MANY
    assert 0.8 * expected <= len(class_labels(figure)) <= expected
    assert sum("samples" in text.get_text() for text in legend) == 2


@pytest.mark.usefixtures("styled")
def test_an_arrow_runs_from_class_mean_to_class_mean():
    source, target = clusters(10, 5), clusters(10, 5, 1)
    figure = projection(source, target, torch.eye(10, dtype=torch.float64) / 10, seed=0)
    points = figure.axes[0].collections
    sources, targets = points[1].get_offsets(), points[3].get_offsets()
    drawn = {tuple(np.round([*a._posA_posB[0], *a._posA_posB[1]], 9)) for a in arrows(figure)}
    assert drawn == {tuple(np.round([*s, *t], 9)) for s, t in zip(sources, targets, strict=True)}
    plane = fit_plane([source.features, target.features], 0)
    mean = plane.project(source.features[source.labels == 3]).mean(0)
    np.testing.assert_allclose(sources[3], mean, rtol=1e-6)
    assert sorted(class_labels(figure)) == sorted(2 * source.class_names)
    # The moves that are drawn are the largest of each class, and any quarter.
    coupling = torch.tensor([[0.30, 0.10, 0.02], [0.04, 0.03, 0.03], [0.0, 0.0, 0.0]])
    moves = strongest_moves(coupling, 10)
    assert [move[:2] for move in moves] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert strongest_moves(coupling, 1) == [Move(0, 0, pytest.approx(0.3))]


@pytest.mark.slow
@pytest.mark.usefixtures("styled")
def test_unlabelled_identical_and_massless_data_are_drawn_and_one_seed_draws_one_picture(tmp_path):
    cloud = LabeledSamples(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), None, ())
    figure = projection(cloud, clusters(4, 4), torch.ones(1, 1), seed=0)
    assert not arrows(figure)
    assert not class_labels(figure)
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    same = LabeledSamples(torch.ones(4, 3), torch.tensor([0, 1, 1, 1]), ("a", "b"), weights)
    figure = projection(same, same, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), seed=0)
    assert class_labels(figure) == ["b", "b"]
    cloud = clusters(400, 3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_picture(projection(cloud, cloud, diagonal(400, 400), seed), tmp_path / name)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_plane_is_that_of_pca_and_both_datasets_count_equally():
    for d in (1, 2, 64):
        clouds = [clusters(10, d).features, clusters(10, d, 1).features + 1000.0]
        plane = fit_plane(clouds, seed=0)
        pooled = torch.cat(clouds).double()
        pooled -= pooled.mean(0)
        _, singular, axes = torch.linalg.svd(pooled, full_matrices=False)
        shares = [*(singular[:2] ** 2 / (singular**2).sum()).tolist(), 0.0][:2]
        np.testing.assert_allclose(plane.explained, shares, rtol=1e-4, atol=1e-12)
        wanted = (pooled[: len(clouds[0])] @ axes[0]).abs()
        found = abs(plane.project(clouds[0])[:, 0])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-2, err_msg=f"{d} features")
    cloud, other = clusters(5, 4).features, clusters(5, 4, 1).features
    once, often = fit_plane([cloud, other], 0), fit_plane([cloud.repeat(7, 1), other], 0)
    np.testing.assert_allclose(once.explained, often.explained, rtol=1e-6)


# contributions.csv and its picture.

IMAGES = (3, 2, 2)
PHOTOS = LabeledSamples(torch.rand(30, 12), torch.arange(30) % 2, ("a, b", "$c$"), name="$x$")


def test_contributions_stand_in_the_order_of_what_they_carry(tmp_path):
    values = torch.randn(30, dtype=torch.float64)
    values[3] = torch.nan
    report = write_contributions(PHOTOS, values, tmp_path, None, target="t")
    table = write_contributions(PHOTOS, values, tmp_path, IMAGES, target="t", content="table")
    for each in (report, table):
        assert [path.name for path in each.written] == ["contributions.csv"]
    with (tmp_path / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 29
    found = [float(row["contribution"]) for row in rows]
    assert found == sorted(found, reverse=True)
    for row in rows:
        place = int(row["row"])
        assert float(row["contribution"]) == float(values[place])
        assert row["class"] == PHOTOS.class_names[place % 2]


@pytest.mark.slow
def test_images_are_drawn_where_rows_are(figures, tmp_path):
    values = torch.rand(30, dtype=torch.float64)
    for shape, given in ((IMAGES, values), ((1, 3, 4), -values)):
        assert not write_contributions(PHOTOS, given, tmp_path, shape, target="t").missing
        assert len(figures[-1].axes) == 12
    values = torch.zeros(30, dtype=torch.float64)
    values[4], values[7] = 40.0, -0.25
    write_contributions(PHOTOS, values, tmp_path, IMAGES, target="drawings")
    figure = figures[-1]
    texts = [text for each in (figure, *figure.subfigs) for text in each.texts]
    title, note, *heads = (text.get_text() for text in texts)
    assert title == "What rows of $x$ contribute to the distance to drawings"
    assert note.endswith("its contribution in units of the cost")
    assert heads == ["carry most of the distance", "bring the datasets nearer"]
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["a, b\n+40.0", "$c$\n−0.250"]
    check_on_page(figure, texts)
