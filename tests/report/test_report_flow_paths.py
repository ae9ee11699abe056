from dataclasses import replace

import numpy as np
import pytest
import torch
from flow_report_cases import Flow, blobs, straight_flow
from matplotlib.collections import LineCollection
from PIL import Image

from otdd_flash.report.figures.principal_plane import fit_plane
from otdd_flash.report.flow import paths as flow_paths
from otdd_flash.report.flow.class_paths import MOST_CLASSES, MOST_LINES
from otdd_flash.report.flow.particles import evenly, evenly_over_classes
from otdd_flash.report.flow.paths import draw_paths


@pytest.fixture
def figures(monkeypatch):
    saved = []
    save = flow_paths.save_picture

    def keep(figure, path):
        save(figure, path)
        saved.append(figure)

    monkeypatch.setattr(flow_paths, "save_picture", keep)
    return saved


def draw(flow, path, seed=0):
    draw_paths(flow.source, flow.target, flow.samples, flow.trajectory, path, seed=seed)


def thin_lines(figure):
    """The paths of particles, class after class."""
    collections = figure.axes[0].collections
    return [c.get_segments() for c in collections if isinstance(c, LineCollection)]


def names(figure):
    return [text.get_text() for text in figure.texts if text.get_path_effects()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_are_projected_trajectories_and_bold_ones_their_class_means(figures, tmp_path):
    flow = straight_flow(classes=3, d=4, n=33, steps=4, keep=20)
    draw(flow, tmp_path / "p.png")
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


def test_a_mean_counts_its_particles_by_weight(figures, tmp_path):
    flow = straight_flow(classes=1, d=3, n=5, keep=5)
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0])
    draw(replace(flow, source=replace(flow.source, weights=weights)), tmp_path / "p.png")
    (lines,) = thin_lines(figures[0])
    assert len(lines) == 2
    (mean,) = figures[0].axes[0].get_lines()
    np.testing.assert_allclose(mean.get_xydata(), 0.25 * lines[0] + 0.75 * lines[1], atol=1e-6)


def test_particles_without_mass_are_drawn_where_no_others_were_kept(figures, tmp_path):
    flow = straight_flow(classes=2, d=3, n=5, keep=4)
    weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    draw(replace(flow, source=replace(flow.source, weights=weights)), tmp_path / "p.png")
    assert [len(lines) for lines in thin_lines(figures[0])] == [2, 2]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("classes", "d", "steps", "n"),
    [
        (None, 5, 3, 40),
        (2, 1, 3, 40),
        (2, 2, 1, 40),
        (20, 6, 3, 200),
        (100, 6, 2, 400),
        (1, 3, 0, 1),
    ],
)
def test_pictures_are_whole_and_can_be_read(figures, tmp_path, classes, d, steps, n):
    flow = straight_flow(classes, d, n=n, steps=steps, keep=n)
    draw(flow, tmp_path / "p.png")
    (figure,) = figures
    with Image.open(tmp_path / "p.png") as image:
        image.verify()
        width, height = image.size
    texts = [*figure.texts, *figure.legends[0].get_texts(), figure.axes[0].xaxis.label]
    boxes = [text.get_window_extent() for text in [*texts, figure.axes[0].yaxis.label]]
    assert all(min(b.x0, b.y0) >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)
    for k, a in enumerate(boxes):
        for b in boxes[:k]:
            assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)
    shown = thin_lines(figure)
    assert len(shown) == min(classes or 1, MOST_CLASSES)
    assert sum(map(len, shown)) == min(n, MOST_LINES, len(shown) * n // (classes or 1))
    assert bool(names(figure)) == (classes is not None)


def test_many_classes_say_that_only_some_are_shown(figures, tmp_path):
    draw(straight_flow(30, 5, n=90, keep=90), tmp_path / "p.png")
    assert legend(figures[0])[1:] == [
        "mean of a class (20 of 30 shown)",
        "shifted blobs (94 samples)",
    ]


def test_points_on_a_line_are_drawn_against_the_step(figures, tmp_path):
    flow = straight_flow(2, 1, steps=3)
    draw(flow, tmp_path / "p.png")
    (figure,) = figures
    assert figure.axes[0].get_xlabel() == "step"
    line = thin_lines(figure)[0][0]
    assert line[:, 0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(np.diff(line[:, 1]), np.diff(line[:, 1])[0], rtol=1e-5)
    (x0, x1), (y0, y1) = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
    target = figure.axes[0].collections[0].get_offsets()
    assert (target[:, 0] > 3).all()
    assert x0 < 0
    assert (target[:, 0] < x1).all()
    assert ((target[:, 1] > y0) & (target[:, 1] < y1)).all()


def test_a_target_in_another_space_is_left_out(figures, tmp_path):
    flow = straight_flow(2, 5)
    draw(replace(flow, target=blobs(2, 7, 30, 1, "features")), tmp_path / "p.png")
    assert legend(figures[0])[2] == "features lies in another space and is not shown"
    assert sorted(names(figures[0])) == ["class 0", "class 1"]


def test_particles_that_never_move_are_drawn(figures, tmp_path):
    flow = straight_flow(2, 3, n=10, keep=10)
    still = replace(flow.source, features=torch.ones(10, 3))
    path = replace(flow.trajectory, points=torch.ones(5, 10, 3))
    draw(Flow(still, still, still, flow.history, path), tmp_path / "p.png")
    assert sum(map(len, thin_lines(figures[0]))) == 10


def test_names_and_titles_are_plain_text(figures, tmp_path):
    flow = straight_flow(2, 3)
    odd = replace(flow.source, class_names=("$x^2", "a name that is far too long to be shown"))
    draw(replace(flow, source=odd), tmp_path / "p.png")
    assert {"$x^2", "a name that is…"} <= set(names(figures[0]))
    assert not any(text.get_parse_math() for text in figures[0].texts)


@pytest.mark.slow
def test_one_seed_draws_one_picture(tmp_path):
    flow = straight_flow(3, 4)
    flow = replace(flow, target=blobs(3, 4, 3000, 1, "many"))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        draw(flow, tmp_path / name, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize(("total", "count"), [(1, 5), (5, 5), (7, 3), (100, 8), (16, 8), (4, 1)])
def test_evenly_has_the_ends_and_no_two_the_same(total, count):
    places = evenly(total, count)
    assert len(set(places.tolist())) == min(total, count)
    assert places[0] == 0
    assert places[-1] == (total - 1 if count > 1 else 0)
    gaps = np.diff(places)
    assert gaps.size < 2 or np.ptp(gaps) <= 1


def test_classes_have_equal_shares_as_far_as_they_go():
    labels = torch.tensor([5] * 2 + [1] * 50 + [3] * 50 + [0] * 50)
    chosen = evenly_over_classes(labels, 152, 32)
    assert torch.bincount(labels[chosen]).tolist() == [10, 10, 0, 10, 0, 2]
    assert labels[chosen].tolist() == [0] * 10 + [1] * 10 + [3] * 10 + [5] * 2
    assert len(set(chosen.tolist())) == 32
    fewer = evenly_over_classes(labels, 152, 31)
    assert torch.bincount(labels[fewer]).tolist() == [10, 10, 0, 9, 0, 2]
    assert labels[evenly_over_classes(labels, 152, 2)].tolist() == [0, 5]
    assert evenly_over_classes(labels, 152, 1000).size == 152
    assert evenly_over_classes(None, 9, 3).tolist() == [0, 4, 8]
