"""paths.png of a flow: the paths of particles and of class means in the principal plane."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flow_report_cases import Flow, blobs, straight_flow
from picture_checks import check_apart, check_on_page

from otdd_flash.report.figures.planes import fit_plane
from otdd_flash.report.flow.paths import (
    MOST_CLASSES,
    MOST_LINES,
    draw_paths,
    evenly,
    evenly_over_classes,
)


def draw(flow, path=None, seed=0):
    draw_paths(flow.source, flow.target, flow.samples, flow.trajectory, path, seed=seed)


def thin_lines(figure):
    """The paths of particles, class after class."""
    from matplotlib.collections import LineCollection

    collections = figure.axes[0].collections
    return [c.get_segments() for c in collections if isinstance(c, LineCollection)]


def names(figure):
    return [text.get_text() for text in figure.texts if text.get_path_effects()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_are_projected_trajectories_and_bold_ones_their_class_means(figures):
    flow = straight_flow(classes=3, d=4, n=33, steps=4, keep=20)
    draw(flow)
    (figure,) = figures
    clouds = [flow.source.features, flow.samples.features, flow.target.features]
    plane = fit_plane(clouds, 0)
    places = torch.stack([plane.project(points) for points in flow.trajectory.points], 1).numpy()
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
    assert legend(figure) == [
        "path of a particle from ○ to ● (20 of 33 shown)",
        "mean of a class",
        "shifted blobs (37 samples), and the means of its classes",
    ]


@pytest.mark.slow
def test_a_mean_counts_its_particles_by_weight(figures):
    flow = straight_flow(classes=1, d=3, n=5, keep=5)
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0])
    draw(replace(flow, source=replace(flow.source, weights=weights)))
    (lines,) = thin_lines(figures[0])
    assert len(lines) == 2
    (mean,) = figures[0].axes[0].get_lines()
    np.testing.assert_allclose(mean.get_xydata(), 0.25 * lines[0] + 0.75 * lines[1], atol=1e-6)
    # Particles without mass are drawn where no others were kept.
    flow = straight_flow(classes=2, d=3, n=5, keep=4)
    weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    draw(replace(flow, source=replace(flow.source, weights=weights)))
    assert [len(lines) for lines in thin_lines(figures[1])] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "d", "steps", "n"),
    [(None, 5, 3, 40), (2, 1, 3, 40), (20, 6, 3, 120), (60, 6, 2, 240), (1, 3, 0, 1)],
)
def test_pictures_can_be_read(figures, classes, d, steps, n):
    draw(straight_flow(classes, d, n=n, steps=steps, keep=n))
    (figure,) = figures
    axes = figure.axes[0]
    texts = [*figure.texts, *figure.legends[0].get_texts(), axes.xaxis.label, axes.yaxis.label]
    check_on_page(figure, texts)
    check_apart(texts)
    shown = thin_lines(figure)
    assert len(shown) == min(classes or 1, MOST_CLASSES)
    assert sum(map(len, shown)) == min(n, MOST_LINES, len(shown) * n // (classes or 1))
    assert bool(names(figure)) == (classes is not None)
    if classes == 60:
        assert legend(figure)[1:] == [
            "mean of a class (20 of 60 shown)",
            "shifted blobs (244 samples)",
        ]


@pytest.mark.slow
def test_points_on_a_line_other_spaces_still_particles_and_odd_names(figures):
    flow = straight_flow(2, 1, steps=3)
    draw(flow)
    axes = figures[0].axes[0]
    assert axes.get_xlabel() == "step"
    line = thin_lines(figures[0])[0][0]
    assert line[:, 0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(np.diff(line[:, 1]), np.diff(line[:, 1])[0], rtol=1e-5)
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    x, y = axes.collections[0].get_offsets().T
    assert x0 < 0
    assert ((x > 3) & (x < x1) & (y > y0) & (y < y1)).all()
    flow = straight_flow(2, 5)
    draw(replace(flow, target=blobs(2, 7, 30, 1, "features")))
    assert legend(figures[1])[2] == "features lies in another space and is not shown"
    assert sorted(names(figures[1])) == ["class 0", "class 1"]
    flow = straight_flow(2, 3, n=10, keep=10)
    still = replace(flow.source, features=torch.ones(10, 3))
    path = replace(flow.trajectory, points=torch.ones(5, 10, 3))
    draw(Flow(still, still, still, flow.history, path))
    assert sum(map(len, thin_lines(figures[2]))) == 10
    odd = replace(flow.source, class_names=("$x^2", "a name that is far too long to be shown"))
    draw(replace(flow, source=odd))
    assert {"$x^2", "a name that is…"} <= set(names(figures[3]))
    assert not any(text.get_parse_math() for text in figures[3].texts)


@pytest.mark.slow
def test_one_seed_draws_one_picture(tmp_path):
    flow = straight_flow(3, 4)
    flow = replace(flow, target=blobs(3, 4, 3000, 1, "many"))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        draw(flow, tmp_path / name, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_particles_that_are_shown_are_even_over_rows_and_classes():
    for total, count in ((1, 5), (5, 5), (7, 3), (100, 8), (16, 8), (4, 1)):
        places = evenly(total, count)
        assert len(set(places.tolist())) == min(total, count)
        assert (places[0], places[-1]) == (0, total - 1 if count > 1 else 0)
        gaps = np.diff(places)
        assert gaps.size < 2 or np.ptp(gaps) <= 1
    labels = torch.tensor([5] * 2 + [1] * 50 + [3] * 50 + [0] * 50)
    chosen = evenly_over_classes(labels, 152, 32)
    assert labels[chosen].tolist() == [0] * 10 + [1] * 10 + [3] * 10 + [5] * 2
    assert len(set(chosen.tolist())) == 32
    fewer = evenly_over_classes(labels, 152, 31)
    assert torch.bincount(labels[fewer]).tolist() == [10, 10, 0, 9, 0, 2]
    assert labels[evenly_over_classes(labels, 152, 2)].tolist() == [0, 5]
    assert evenly_over_classes(labels, 152, 1000).size == 152
    assert evenly_over_classes(None, 9, 3).tolist() == [0, 4, 8]
