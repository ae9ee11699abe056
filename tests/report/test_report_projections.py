"""projection.png: both datasets in their principal plane, and what moves where."""

import numpy as np
import pytest
import torch
from picture_checks import check_apart, check_on_page

from otdd_flash.report import distance as projections
from otdd_flash.report.distance import Move, projection, strongest_moves
from otdd_flash.report.figures.planes import fit_plane
from otdd_flash.report.figures.point_names import RADII, place_labels
from otdd_flash.samples import LabeledSamples


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
    return [text.get_text() for text in figure.texts if text.get_path_effects()]


def arrows(figure):
    from matplotlib.patches import FancyArrowPatch

    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "d"), [((10, 10), 2), ((3, 2), 1), ((1, 1), 5), ((60, 60), 8)])
def test_labels_of_pictures_are_apart(figures, classes, d):
    source, target = clusters(classes[0], d, name="$a$ and $b"), clusters(classes[1], d, 1)
    projection(source, target, diagonal(*classes), None, seed=0)
    (figure,) = figures
    axes = figure.axes[0]
    texts = [*figure.texts, *figure.legends[0].get_texts(), axes.xaxis.label]
    check_on_page(figure, [*texts, axes.yaxis.label])
    check_apart([*texts, axes.yaxis.label])
    assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())
    expected = sum(classes) if max(classes) <= 20 else 2 * projections.MOVES_OF_MANY
    assert 0.8 * expected <= len(class_labels(figure)) <= expected


def test_an_arrow_runs_from_class_mean_to_class_mean(figures):
    source, target = clusters(10, 5), clusters(10, 5, 1)
    projection(source, target, torch.eye(10, dtype=torch.float64) / 10, None, seed=0)
    (figure,) = figures
    points = figure.axes[0].collections
    sources, targets = points[1].get_offsets(), points[3].get_offsets()
    drawn = {tuple(np.round([*a._posA_posB[0], *a._posA_posB[1]], 9)) for a in arrows(figure)}
    assert drawn == {tuple(np.round([*s, *t], 9)) for s, t in zip(sources, targets, strict=True)}
    plane = fit_plane([source.features, target.features], 0)
    mean = plane.project(source.features[source.labels == 3]).mean(0)
    np.testing.assert_allclose(sources[3], mean, rtol=1e-6)
    assert sorted(class_labels(figure)) == sorted(2 * source.class_names)


@pytest.mark.slow
def test_unlabelled_identical_and_massless_data_are_drawn(figures):
    cloud = LabeledSamples(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), None, ())
    projection(cloud, clusters(4, 4), torch.ones(1, 1), None, seed=0)
    assert not arrows(figures[0])
    assert not class_labels(figures[0])
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    same = LabeledSamples(torch.ones(4, 3), torch.tensor([0, 1, 1, 1]), ("a", "b"), weights)
    projection(same, same, torch.tensor([[0.0, 0.0], [0.0, 1.0]]), None, seed=0)
    assert class_labels(figures[1]) == ["b", "b"]
    with pytest.raises(ValueError, match="coupling has 3 classes, samples has 4"):
        projection(clusters(4, 2), clusters(4, 2), torch.ones(3, 4), None, seed=0)


@pytest.mark.slow
def test_one_seed_draws_one_picture(tmp_path):
    cloud = clusters(400, 3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        projection(cloud, cloud, diagonal(400, 400), tmp_path / name, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_plane_is_that_of_pca_and_both_datasets_count_equally():
    for d in (1, 2, 5, 64):
        clouds = [clusters(10, d).features, clusters(10, d, 1).features + 1000.0]
        plane = fit_plane(clouds, seed=0)
        pooled = torch.cat(clouds).double()
        pooled -= pooled.mean(0)
        _, singular, axes = torch.linalg.svd(pooled, full_matrices=False)
        shares = [*(singular[:2] ** 2 / (singular**2).sum()).tolist(), 0.0][:2]
        np.testing.assert_allclose(plane.explained, shares, rtol=1e-4, atol=1e-12)
        wanted = (pooled[: len(clouds[0])] @ axes[0]).abs()
        found = plane.project(clouds[0])[:, 0].abs()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-2, err_msg=f"{d} features")
    cloud, other = clusters(5, 4).features, clusters(5, 4, 1).features
    once, often = fit_plane([cloud, other], 0), fit_plane([cloud.repeat(7, 1), other], 0)
    np.testing.assert_allclose(once.explained, often.explained, rtol=1e-6)


def test_moves_are_the_largest_of_each_class_and_any_quarter():
    coupling = torch.tensor([[0.30, 0.10, 0.02], [0.04, 0.03, 0.03], [0.0, 0.0, 0.0]])
    moves = strongest_moves(coupling, 10)
    assert [move[:2] for move in moves] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert strongest_moves(coupling, 1) == [Move(0, 0, pytest.approx(0.3))]


def test_labels_avoid_each_other_their_points_and_the_frame():
    draw = np.random.default_rng(0)
    anchors, sizes = draw.uniform(300, 500, (25, 2)), np.tile([60.0, 14.0], (25, 1))
    markers, none = np.hstack([anchors - 8, anchors + 8]), np.empty((0, 2, 2))
    spots = place_labels(anchors, sizes, markers, none, (0, 0, 800, 800))
    centres = np.array([spot.centre for spot in spots if spot is not None])
    assert len(centres) == 25
    boxes = np.vstack([np.hstack([centres - sizes / 2, centres + sizes / 2]), markers])
    for k, a in enumerate(boxes[:25]):
        for j, b in enumerate(boxes):
            assert j == k or not ((a[:2] < b[2:]).all() and (b[:2] < a[2:]).all())
    assert max(spot.distance for spot in spots if spot is not None) <= RADII[-1]
    assert place_labels(anchors[:1], sizes[:1], markers[:1], none, (0, 0, 9, 9)) == [None]
