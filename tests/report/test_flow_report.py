"""What is written of a flow: its data, the objective, paths, images and an animation."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_report_cases import Flow, blobs, image_flow, record, straight_flow
from picture_checks import check_apart, check_on_page
from PIL import Image
from rich.console import Console

from otdd_flash.errors import InputError
from otdd_flash.flows.result import StepRecord
from otdd_flash.report import flow as flow_writing
from otdd_flash.report import flow_pictures as animation
from otdd_flash.report.flow import (
    draw_objective,
    flow_table,
    write_flow_report,
    write_metrics_csv,
)
from otdd_flash.report.flow_pictures import (
    BACKGROUND,
    FIRST_PAUSE,
    LAST_PAUSE,
    MOST_CLASSES,
    MOST_LINES,
    draw_images,
    draw_paths,
    evenly_over_classes,
    write_animation,
)
from otdd_flash.report.page import TARGET_COLOR, new_figure
from otdd_flash.report.planes import fit_plane
from otdd_flash.samples import LabeledSamples

# Files.

ALWAYS = ["adapted.npz", "adapted", "metrics.csv", "trajectory.npz", "objective.png", "paths.png"]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def listing(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_images_have_pictures_and_data_are_safe_before_any_is_drawn(
    tmp_path, datasets, monkeypatch
):
    run = tmp_path / "run"
    # A wrong shape is refused before anything is written.
    with pytest.raises(InputError, match="no images of shape"):
        write_flow_report(image_flow(steps=1), run, image_shape=(1, 5, 5))
    assert not run.exists()
    written = write_flow_report(image_flow(steps=2), run, image_shape=(1, 5, 4))
    assert [path.name for path in written.written] == [*ALWAYS, "images.png", "flow.gif"]
    assert listing(run) == {*ALWAYS, "images.png", "flow.gif"}
    assert datasets.load_from_disk(str(run / "adapted"))[0]["image"].size == (4, 5)

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(flow_writing, "draw_objective", fail)
    with pytest.raises(KeyboardInterrupt):
        write_flow_report(straight_flow(), tmp_path / "other")
    assert listing(tmp_path / "other") >= set(ALWAYS[:4])
    table = datasets.load_from_disk(str(tmp_path / "other" / "adapted"))
    assert table.column_names == ["features", "label"]
    with np.load(tmp_path / "other" / "trajectory.npz") as archive:
        assert archive.files == ["rows", "steps", "points", "labels"]
        np.testing.assert_array_equal(archive["points"], straight_flow().trajectory.points)


def test_metrics_have_a_line_per_step_and_a_column_per_functional(tmp_path):
    history = [
        record(0, 1 / 3, functionals={"entropy, e": -1.5}),
        record(1, 0.25, functionals={"potential": 2.0}, converged=False),
    ]
    write_metrics_csv(history, tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as lines:
        first, second = csv.DictReader(lines)
    shared = [name for name in StepRecord.__dataclass_fields__ if name != "functionals"]
    assert list(first) == [*shared, "functional.entropy, e", "functional.potential"]
    assert float(first["divergence"]) == 1 / 3
    assert (first["functional.entropy, e"], first["functional.potential"]) == ("-1.5", "")
    assert (second["functional.entropy, e"], second["functional.potential"]) == ("", "2.0")
    assert (second["step"], second["converged"], second["iterations"]) == ("1", "false", "11")


# objective.png


def band(axes):
    """The lower and upper end of the band at every step."""
    (collection,) = axes.collections
    corners = collection.get_paths()[0].vertices
    return {
        float(x): (corners[corners[:, 0] == x, 1].min(), corners[corners[:, 0] == x, 1].max())
        for x in np.unique(corners[:, 0])
    }


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture
def drawn(styled):
    """The axes of a history's picture."""
    return lambda history, title="": draw_objective(history, title).axes


def test_the_band_is_the_bounds_and_the_line_the_divergence(drawn):
    history = straight_flow(steps=4).history
    top, bounds, slope, passes = drawn(history, "a → b")
    assert band(top) == {r.step: (pytest.approx(r.lower), pytest.approx(r.upper)) for r in history}
    offsets = {r.step: (pytest.approx(-0.1), pytest.approx(0.2)) for r in history}
    assert band(bounds) == offsets
    (line,) = top.get_lines()
    assert line.get_xydata().tolist() == [[r.step, r.divergence] for r in history]
    assert slope.get_lines()[0].get_ydata().tolist() == [r.gradient_norm for r in history]
    assert passes.patches[0].get_data().values.tolist() == [r.iterations for r in history]
    assert legend(top) == [
        "dataset distance to the target: 8 → 0.5",
        "solver bounds, by themselves below",
    ]


@pytest.mark.slow
def test_objectives_estimates_and_steps_that_did_not_converge_are_drawn_and_named(drawn):
    history = [record(k, 8.0 - k, objective=9.0 + k, functionals={"$e": 1.0}) for k in range(3)]
    history[1] = replace(history[1], converged=False)
    top = drawn(history, "$a$")[0]
    assert top.get_lines()[1].get_ydata().tolist() == [9.0, 10.0, 11.0]
    assert "objective: distance + $e" in legend(top)
    (marked,) = [line for line in top.get_lines() if line.get_markerfacecolor() == "white"]
    assert marked.get_xydata().tolist() == [[1.0, 7.0]]
    assert "not converged: only the solver bounds hold" in legend(top)
    # Estimates are dots without line or bounds.
    unknown = {"objective": None, "divergence": None, "lower": None, "upper": None}
    estimates = [
        replace(record(k, 0.0), **unknown, estimate=9.0 - k, estimated_on=1200) for k in range(3)
    ]
    top, _, slope, _ = drawn([record(0, 6.0), *estimates, record(3, 5.0)])
    whole, dots = top.get_lines()
    assert whole.get_xydata().tolist() == [[0, 6.0], [3, 5.0]]
    assert dots.get_xydata().tolist() == [[0, 9.0], [1, 8.0], [2, 7.0]]
    assert {whole.get_linestyle(), dots.get_linestyle()} == {"None"}
    assert legend(top)[1] == "estimates on 1,200 points"
    (bounds,) = top.collections
    ends = [sorted(line[:, 1]) for line in bounds.get_segments()]
    assert ends == [pytest.approx([5.9, 6.2]), pytest.approx([4.9, 5.2])]
    assert slope.get_lines()[0].get_xdata().tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_scale_suits_the_values_and_all_are_in_sight(drawn):
    for values, scale in (
        ([8.0, 4.0, 0.5], "log"),
        ([8.0, 4.0, 0.9], "linear"),
        ([8.0, 0.1, -0.01], "linear"),
        ([0.0], "linear"),
    ):
        top = drawn([record(k, value) for k, value in enumerate(values)])[0]
        assert top.get_yscale() == scale, values
        assert top.get_ylabel() == f"in units of the cost, {scale} scale"
        low, high = top.get_ylim()
        assert low < min(values)
        assert max(values) < high
    # Far bounds are cut and do not flatten the curve.
    far = [record(0, 8.0, upper=1e6), record(1, 4.0, lower=-1e6)]
    far.append(record(2, 0.5, lower=-np.inf, upper=0.9))
    top = drawn(far)[0]
    low, high = top.get_ylim()
    assert 0.1 < low < 0.5
    assert 8 < high < 40
    assert band(top)[2] == (pytest.approx(0.5 / 3), 0.9)
    # Narrow ones leave ticks without an offset, and all texts on the page.
    panels = drawn([record(0, 8.0, lower=8.0 - 5e-7, upper=8.0 + 5e-7)], "a very long title " * 20)
    figure = panels[0].figure
    check_on_page(figure, [*(axes.yaxis.label for axes in panels), panels[0]._left_title])
    assert panels[0].yaxis.get_offset_text().get_text() == ""
    low, high = panels[1].get_ylim()
    assert 1e-6 / (high - low) > 0.1


def test_bounds_are_in_sight_where_no_value_is_finite():
    axes = new_figure().add_subplot()
    nothing, lower, upper = np.array([np.nan]), np.array([0.25]), np.array([0.75])
    assert flow_writing._choose_scale(axes, nothing, lower, upper) == (lower, upper)
    low, high = axes.get_ylim()
    assert -0.5 < low < 0
    assert 1 < high < 1.5


@pytest.mark.parametrize("converged", [True, False])
def test_a_table_says_whether_steps_stopped_early(converged):
    saved = Path(__file__).parents[1] / "fixtures/saved/flow/result.json"
    table = flow_table(json.loads(saved.read_text("utf-8")) | {"converged": converged})
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    assert ("some step stopped early" in console.file.getvalue()) != converged


# paths.png


def draw(flow, seed=0):
    return draw_paths(flow.source, flow.target, flow.samples, flow.trajectory, seed=seed)


def thin_lines(figure):
    """The paths of particles, class after class."""
    from matplotlib.collections import LineCollection

    collections = figure.axes[0].collections
    return [c.get_segments() for c in collections if isinstance(c, LineCollection)]


def point_names(figure):
    return [text for text in figure.axes[0].texts if text.get_path_effects()]


def names(figure):
    return [text.get_text() for text in point_names(figure)]


def page_legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.mark.usefixtures("styled")
def test_lines_are_projected_trajectories_and_bold_ones_their_class_means():
    flow = straight_flow(classes=3, d=4, n=33, steps=4, keep=20)
    figure = draw(flow)
    clouds = [flow.source.features, flow.samples.features, flow.target.features]
    plane = fit_plane(clouds, 0)
    places = np.stack([plane.project(points) for points in flow.trajectory.points], 1)
    drawn = [line for lines in thin_lines(figure) for line in lines]
    assert len(drawn) == 20
    for line in drawn:
        assert np.abs(places - line).max((1, 2)).min() < 1e-6
    labels = flow.trajectory.labels[0]
    means = [line.get_xydata() for line in figure.axes[0].get_lines()]
    assert len(means) == 3
    for mean in means:
        of_classes = np.stack([places[labels == k].mean(0) for k in range(3)])
        assert np.abs(of_classes - mean).max((1, 2)).min() < 1e-6
    assert sorted(names(figure)) == sorted(2 * ["class 0", "class 1", "class 2"])
    # Those of the target are in italics.
    assert sum(text.get_style() == "italic" for text in point_names(figure)) == 3
    assert page_legend(figure) == [
        "path of a particle from ○ to ● (20 of 33 shown)",
        "mean of a class",
        "shifted blobs (37 samples), and the means of its classes",
    ]
    # A mean counts its particles by weight.
    flow = straight_flow(classes=1, d=3, n=5, keep=5)
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0])
    figure = draw(replace(flow, source=replace(flow.source, weights=weights)))
    (lines,) = thin_lines(figure)
    assert len(lines) == 2
    (mean,) = figure.axes[0].get_lines()
    np.testing.assert_allclose(mean.get_xydata(), 0.25 * lines[0] + 0.75 * lines[1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "d", "steps", "n"), [(None, 5, 3, 40), (60, 6, 2, 240), (1, 3, 0, 1)]
)
@pytest.mark.usefixtures("styled")
def test_pictures_can_be_read(classes, d, steps, n):
    figure = draw(straight_flow(classes, d, n=n, steps=steps, keep=n))
    axes = figure.axes[0]
    texts = [*axes.texts, *axes.get_legend().get_texts(), axes.xaxis.label, axes.yaxis.label]
    texts.append(axes._left_title)
    check_on_page(figure, texts)
    check_apart(texts)
    shown = thin_lines(figure)
    assert len(shown) == min(classes or 1, MOST_CLASSES)
    assert sum(map(len, shown)) == min(n, MOST_LINES, len(shown) * n // (classes or 1))
    assert bool(names(figure)) == (classes is not None)
    if classes == 60:
        assert page_legend(figure)[1] == "mean of a class (20 of 60 shown)"


@pytest.mark.slow
@pytest.mark.usefixtures("styled")
def test_points_on_a_line_other_spaces_still_particles_and_odd_names():
    figure = draw(straight_flow(2, 1, steps=3))
    assert figure.axes[0].get_xlabel() == "step"
    assert thin_lines(figure)[0][0][:, 0].tolist() == [0, 1, 2, 3]
    flow = straight_flow(2, 5)
    figure = draw(replace(flow, target=blobs(2, 7, 30, 1, "features")))
    assert page_legend(figure)[2] == "features lies in another space and is not shown"
    assert sorted(names(figure)) == ["class 0", "class 1"]
    flow = straight_flow(2, 3, n=10, keep=10)
    still = replace(flow.source, features=torch.ones(10, 3))
    path = replace(flow.trajectory, points=torch.ones(5, 10, 3))
    figure = draw(Flow(still, still, still, flow.history, path))
    assert sum(map(len, thin_lines(figure))) == 10
    odd = replace(flow.source, class_names=("$x^2", "a name that is far too long to be shown"))
    figure = draw(replace(flow, source=odd))
    assert {"$x^2", "a name that is…"} <= set(names(figure))
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)


def test_particles_that_are_shown_are_even_over_rows_and_classes():
    labels = torch.tensor([5] * 2 + [1] * 50 + [3] * 50 + [0] * 50)
    chosen = evenly_over_classes(labels, 152, 32)
    assert labels[chosen].tolist() == [0] * 10 + [1] * 10 + [3] * 10 + [5] * 2
    assert len(set(chosen.tolist())) == 32
    fewer = evenly_over_classes(labels, 152, 31)
    assert torch.bincount(labels[fewer]).tolist() == [10, 10, 0, 9, 0, 2]
    assert evenly_over_classes(labels, 152, 1000).size == 152
    assert evenly_over_classes(None, 9, 3).tolist() == [0, 4, 8]


# images.png and flow.gif

GREY, COLOUR = (1, 5, 4), (3, 4, 6)


def draw_grid(flow, shape):
    return draw_images(flow.source, flow.target, flow.trajectory, shape)


def animate(flow, shape, path):
    """The frames of the GIF, RGB."""
    write_animation(flow.source, flow.target, flow.trajectory, shape, path)
    frames = []
    with Image.open(path) as gif:
        for k in range(gif.n_frames):
            gif.seek(k)
            frames.append(np.asarray(gif.convert("RGB")).astype(int))
    return frames


def cells(frame, shape, side, rows, strip):
    """Where images are in a frame, by its bottom left corner."""
    _, h, w = shape
    factor = ((animation.WIDTH - animation.GAP) // side - animation.GAP) // w
    down, across = h * factor + strip + animation.GAP, w * factor + animation.GAP
    first = frame.shape[0] - rows * down + strip
    return [
        (
            slice(first + row * down, first + row * down + h * factor),
            slice(animation.GAP + k * across, animation.GAP + k * across + w * factor),
        )
        for row in range(rows)
        for k in range(side)
    ]


def grid(figure):
    """Images by row and column of the page."""
    places = [(image.get_extent()[3], image.get_extent()[0]) for image in figure.axes[0].images]
    rows, columns = (sorted({place[k] for place in places}) for k in range(2))
    return {
        (rows.index(top), columns.index(left)): np.asarray(image.get_array())
        for (top, left), image in zip(places, figure.axes[0].images, strict=True)
    }


def heads_and_names(figure):
    """The words above columns of steps, left and right of rows, and above the nearest images."""
    (axes,) = figure.axes
    right = [text for other in axes.child_axes for text in other.get_yticklabels()]
    parts = axes.get_xticklabels(), axes.get_yticklabels(), right, axes.texts
    return [[text.get_text() for text in part] for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GREY, COLOUR])
@pytest.mark.usefixtures("styled")
def test_rows_are_particles_columns_steps_and_the_last_the_nearest_of_the_target(shape):
    flow = image_flow(shape, classes=2, steps=10)
    ends = flow.trajectory.points[-1]
    # Row 2 k lies where particle k ended and has its class, row 2 k + 1 a little off and another.
    features = torch.stack([ends, ends + 0.01], 1).flatten(0, 1)
    labels = torch.stack([flow.source.labels, 1 - flow.source.labels], 1).flatten()
    target = LabeledSamples(features, labels, ("like 0", "like 1"), name="mirror")
    figure = draw_grid(replace(flow, target=target), shape)
    cells = grid(figure)
    assert len(cells) == 12 * (8 + 2)
    levels = (flow.trajectory.points.clamp(0, 1) * 255).round().byte()
    images = levels.reshape(11, 70, *shape).permute(0, 1, 3, 4, 2).squeeze(-1).numpy()
    flat = images[0].reshape(70, -1)
    particles = [
        int(np.flatnonzero((flat == cells[row, 0].ravel()).all(1)).item()) for row in range(12)
    ]
    assert flow.source.labels[particles].tolist() == [0] * 6 + [1] * 6
    for column, step in enumerate([0, 1, 3, 4, 6, 7, 9, 10]):
        for row, particle in enumerate(particles):
            np.testing.assert_array_equal(cells[row, column], images[step, particle])
    for row in range(12):
        np.testing.assert_array_equal(cells[row, 8], cells[row, 7])
        assert np.abs(cells[row, 9].astype(int) - cells[row, 7]).max() <= 3
    steps, classes, nearest, over = heads_and_names(figure)
    assert steps == ["step 0", "1", "3", "4", "6", "7", "9", "10"]
    assert classes == ["class 0"] * 6 + ["class 1"] * 6
    assert over == ["nearest in the target"]
    assert nearest == ["like 0"] * 6 + ["like 1"] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("styled")
def test_nothing_leaves_the_page_and_a_target_of_other_features_has_no_columns():
    flow = image_flow(COLOUR, 30, steps=1)
    long = tuple(f"{name} with $ and a long tail" for name in flow.source.class_names)
    flow = replace(flow, source=replace(flow.source, class_names=long))
    figure = draw_grid(flow, COLOUR)
    (axes,) = figure.axes
    words = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes._left_title]
    check_on_page(figure, [*words, *axes.child_axes[0].get_yticklabels(), *axes.images])
    flow = replace(image_flow(GREY, 2, steps=1), target=blobs(2, 7, 9, 0, "features"))
    figure = draw_grid(flow, GREY)
    assert len(grid(figure)) == 12 * 2
    classes = ["class 0"] * 6 + ["class 1"] * 6
    assert heads_and_names(figure) == [["step 0", "1"], classes, [], []]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_an_animation_has_a_frame_per_step_and_rests_at_both_ends(tmp_path, shape):
    flow = image_flow(shape, steps=3)
    frames = animate(flow, shape, tmp_path / "flow.gif")
    with Image.open(tmp_path / "flow.gif") as gif:
        assert gif.n_frames == 4
        assert gif.info["loop"] == 0
        durations = []
        for k in range(4):
            gif.seek(k)
            durations.append(gif.info["duration"])
    usual = durations[1]
    assert durations == [usual + FIRST_PAUSE, usual, usual, usual + LAST_PAUSE]
    c, h, w = shape
    first = (flow.trajectory.points[:, 0].clamp(0, 1) * 255).round().reshape(4, c, h, w)
    for k in (0, 2, 3):
        corner = frames[k][cells(frames[k], shape, 8, 8, animation.STRIP)[0]]
        factor = corner.shape[0] // h
        wanted = first[k].permute(1, 2, 0).expand(h, w, 3).numpy()
        off = np.abs(corner[::factor, ::factor] - wanted)
        # A palette of 256 colours has greys but one exactly and colours nearly.
        assert off.max() <= 1 if c == 1 else off.mean() <= 16
    # Long flows have sixty frames, of images as large as the width lets them be.
    flow = image_flow((1, 2, 2), classes=None, steps=130)
    path = flow.trajectory
    one = replace(path, rows=path.rows[:1], points=path.points[:, :1])
    frames = animate(replace(flow, trajectory=one), (1, 2, 2), tmp_path / "long.gif")
    assert len(frames) == 60
    assert frames[0].shape[:2] == (animation.LINE + 5 + 4 + 592 + 4, 4 + 592 + 4)


@pytest.mark.slow
def test_images_that_their_label_no_longer_fits_are_framed_below_their_label(tmp_path):
    shape = COLOUR
    flow = image_flow(shape, classes=2, steps=1)
    names = "WWWWWWWWWWWWWWWWWWWWW", "g" * 300
    # All end where an image of class 1 is, and began as one of their own class.
    target = LabeledSamples(flow.trajectory.points[-1], torch.zeros(70).long(), names[1:])
    long = replace(flow.source, class_names=names)
    frames = animate(replace(flow, target=target, source=long), shape, tmp_path / "a.gif")
    color = [int(TARGET_COLOR[k : k + 2], 16) for k in (1, 3, 5)]
    for frame, first_marked in ((frames[0], False), (frames[-1], True)):
        for k, (rows, columns) in enumerate(cells(frame, shape, 8, 8, animation.STRIP)):
            middle = (rows.start + rows.stop) // 2
            side = frame[middle, columns.start - 2]
            assert (np.abs(side - color).max() <= 8) == (first_marked and k < 32), k
            strip = frame[rows.start - animation.STRIP : rows.start]
            between = strip[:, columns.stop : columns.stop + animation.GAP]
            assert first_marked or (between == int(BACKGROUND[1:3], 16)).all()
            assert (strip[:, columns] < 100).any()


def test_what_are_no_images_is_refused(tmp_path):
    for write in (draw_grid, lambda *flow: animate(*flow, tmp_path / "flow.gif")):
        with pytest.raises(InputError, match=r"20 values are no images of shape \(3, 4, 6\)"):
            write(image_flow(GREY), COLOUR)
    assert not list(tmp_path.iterdir())
