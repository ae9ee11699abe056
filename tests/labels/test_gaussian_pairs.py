"""Gaussian distances of lists of class pairs: invariants, closed forms, no effect of the list."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import decomposing_by, every_route, moved, numpy_points, random_cloud
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_bures import squared_bures_wasserstein

from otdd_flash.labels import pair_chunks
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import (
    diagonal_gaussian_distances,
    gaussian_distances,
)
from otdd_flash.labels.moment_distances import mean_distances, upper_bound_distances
from otdd_flash.labels.moments import squared_gaps
from otdd_flash.labels.pairs import all_pairs

METHODS = {
    "gaussian": gaussian_distances,
    "diagonal": diagonal_gaussian_distances,
    "means": mean_distances,
    "upper_bound": upper_bound_distances,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
PAIR = torch.tensor([[1, 0]])
brief = settings(max_examples=20, deadline=None)
shapes = {
    "seed": st.integers(0, 2**32 - 2),
    "dim": st.integers(1, 9),
    "sizes": st.tuples(st.integers(2, 20), st.integers(2, 20)),
}


def distance(one, two, **options):
    return float(gaussian_distances([one, two], PAIR, **options).values)


def random_pair(seed, dim, sizes, **options):
    return [random_cloud(size, dim, seed + k, **options) for k, size in enumerate(sizes)]


@pytest.mark.slow
@every_route
@brief
@given(**shapes)
def test_symmetric_and_the_same_for_moved_and_shuffled_classes(route, seed, dim, sizes):
    one, two = random_pair(seed, dim, sizes)
    rng = np.random.default_rng(seed)
    shift = torch.from_numpy(rng.normal(scale=10, size=dim))
    shuffled = [
        moved(cloud, cloud.points[torch.from_numpy(rng.permutation(len(cloud)))] + shift)
        for cloud in (one, two)
    ]
    with decomposing_by(route):
        value = distance(one, two)
        assert distance(two, one) == pytest.approx(value, rel=1e-11, abs=1e-11)
        assert distance(*shuffled) == pytest.approx(value, rel=1e-11, abs=1e-11)
        assert value >= 0


@pytest.mark.slow
@every_route
@brief
@given(**shapes, factor=st.floats(1e-6, 1e6))
def test_scaling_points_scales_by_the_square(route, seed, dim, sizes, factor):
    pair = random_pair(seed, dim, sizes)
    scaled = [moved(cloud, factor * cloud.points) for cloud in pair]
    with decomposing_by(route):
        expected = factor**2 * distance(*pair)
        assert distance(*scaled) == pytest.approx(expected, rel=1e-11, abs=1e-11 * factor**2)


@pytest.mark.slow
@every_route
@brief
@given(**shapes)
def test_plain_gaussian_is_a_lower_bound_of_exact_transport(route, seed, dim, sizes):
    ot = pytest.importorskip("ot")
    one, two = random_pair(seed, dim, sizes)
    exact = ot.emd2([], [], ot.dist(numpy_points(one), numpy_points(two)))
    with decomposing_by(route):
        assert distance(one, two, unbiased=False) <= exact * (1 + 1e-9) + 1e-9


@every_route
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("size", "dim"), [(1, 3), (7, 30), (30, 7), (16, 16), (200, 40)])
def test_a_class_is_at_zero_from_itself(route, size, dim, weighted):
    cloud = random_cloud(size, dim, weighted=weighted)
    shuffled = torch.randperm(size, generator=torch.manual_seed(1))
    weights = None if cloud.weights is None else cloud.weights[shuffled]
    again = ClassCloud("again", cloud.points[shuffled], weights)
    total = float(cloud.points.square().sum()) / size
    with decomposing_by(route):
        assert distance(cloud, again, unbiased=False) == pytest.approx(0, abs=1e-13 * total)


@every_route
@pytest.mark.parametrize("sizes", [(40, 60), (40, 5), (5, 8), (3, 400)])
@pytest.mark.parametrize("unbiased", [True, False])
def test_dense_square_roots_agree(route, sizes, unbiased):
    one, two = random_pair(3, 12, sizes)
    expected = squared_bures_wasserstein(numpy_points(one), numpy_points(two), unbiased=unbiased)
    # The square root of a singular matrix is only good to half the digits.
    tolerance = 1e-11 if min(sizes) > 12 else 1e-6
    with decomposing_by(route):
        assert distance(one, two, unbiased=unbiased) == pytest.approx(expected, rel=tolerance)


@every_route
@pytest.mark.parametrize("copies", [2, 5])
def test_points_and_triangles_give_the_same_distance(route, copies):
    """Every point several times is the same class, large enough for the other factor."""
    one, two = random_pair(0, 20, (9, 13))
    many = [moved(cloud, cloud.points.repeat(copies, 1)) for cloud in (one, two)]
    with decomposing_by(route):
        expected = distance(one, two, unbiased=False)
        for first, second in ((many[0], many[1]), (one, many[1]), (many[0], two)):
            value = distance(first, second, unbiased=False)
            assert value == pytest.approx(expected, rel=1e-12)


@every_route
def test_commuting_covariances_have_a_closed_form(route):
    """Grids scaled along common, turned axes: the difference of the standard deviations."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * 4), -1).reshape(-1, 4)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    scales = np.array([[1, 2, 3, 4], [4, 1e-3, 5, 0]])
    one, two = (ClassCloud("grid", torch.from_numpy(grid * scale @ turn), None) for scale in scales)
    expected = ((scales[0] - scales[1]) ** 2).sum() * 2 / 3
    with decomposing_by(route):
        assert distance(one, two, unbiased=False) == pytest.approx(expected, rel=1e-13)


@every_route
@pytest.mark.parametrize("sizes", [(30, 8), (2, 50), (2, 2)])
def test_in_one_dimension_deviations_are_compared(route, sizes):
    one, two = random_pair(0, 1, sizes)
    expected = (one.points.mean() - two.points.mean()) ** 2 + (
        one.points.std() - two.points.std()
    ) ** 2
    with decomposing_by(route):
        assert distance(one, two) == pytest.approx(float(expected), rel=1e-12)


@every_route
def test_degenerate_covariances_are_nothing_special(route):
    """Orthogonal pieces share nothing: a line, a plane of doubled features, equal points."""
    line, plane = torch.zeros(4, 30).double(), torch.zeros(50, 30).double()
    line[:, 0] = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    plane[:, 1] = plane[:, 2] = torch.linspace(-1, 1, 50).double()
    equal = torch.zeros(40, 30).double()
    clouds = [ClassCloud("piece", points, None) for points in (line, plane, equal)]
    variances = [float(cloud.points.var(0).sum()) for cloud in clouds]
    with decomposing_by(route):
        values = gaussian_distances(clouds, all_pairs(3)).values
    expected = [variances[i] + variances[j] for i, j in all_pairs(3).tolist()]
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-13)


@every_route
def test_whole_weights_count_as_repetitions(route):
    one, two = random_pair(0, 6, (9, 14))
    repeats = torch.arange(9) % 3 + 1
    weighted = ClassCloud("weighted", one.points, repeats.double() / repeats.sum())
    repeated = moved(one, one.points.repeat_interleave(repeats, 0))
    with decomposing_by(route):
        expected = distance(repeated, two, unbiased=False)
        assert distance(weighted, two, unbiased=False) == pytest.approx(expected, rel=1e-12)


def near_clouds(count, size, dim):
    """Classes so near that their distances show the last bits of fidelities."""
    base = random_cloud(size, dim).points
    return [
        ClassCloud("near", base + 1e-3 * random_cloud(size, dim, seed).points, None)
        for seed in range(count)
    ]


def mixed_clouds(dim=24):
    """Classes of one size and of very different ones, with both kinds of factors."""
    sizes = (2, 3, 5, 23, 26, 31, 57, 400)
    others = [random_cloud(size, dim, size, dtype=torch.float32) for size in sizes]
    return near_clouds(5, 20, dim) + near_clouds(4, 40, dim) + others


def check_independence(method, clouds):
    pairs = all_pairs(len(clouds))
    whole = method(clouds, pairs).values
    order = torch.randperm(len(pairs), generator=torch.manual_seed(0))
    assert torch.equal(method(clouds, pairs[order]).values, whole[order])
    for some in (order[:1], order[:2], order[5:12], order[20:53]):
        assert torch.equal(method(clouds, pairs[some]).values, whole[some])
    for position in range(0, len(pairs), 11):
        i, j = pairs[position].tolist()
        alone = method([clouds[j], clouds[i]], PAIR).values
        assert torch.equal(alone, whole[position : position + 1])


@pytest.mark.slow(after=13)
@every_method
@every_route
@pytest.mark.parametrize("entries", [1, 2**13, 2**17])
def test_a_pair_does_not_depend_on_the_others(method, route, entries, monkeypatch):
    """To the last bit, in chunks of one pair, of several, and of all."""
    monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", entries)
    with decomposing_by(route):
        check_independence(method, mixed_clouds())


@pytest.mark.parametrize("threads", [1, 2])
def test_wide_products_do_not_depend_on_the_others(threads):
    """Threads share the sums of a single wide product, and those of a batch they do not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_independence(gaussian_distances, near_clouds(8, 25, 784))
    finally:
        torch.set_num_threads(before)


@every_method
def test_only_the_classes_of_the_pairs_are_read(method):
    lone = ClassCloud("lone", torch.zeros(1, 4), None)
    clouds = [lone, *random_pair(0, 4, (7, 9)), lone]
    values = method(clouds, torch.tensor([[2, 1]])).values
    assert torch.equal(values, method(clouds[1:3], PAIR).values)


@every_method
def test_no_pairs_have_no_distances(method):
    result = method([random_cloud(1, 4)], all_pairs(1))
    assert [len(part) for part in result] == [0, 0, 0]
    assert result.values.dtype == torch.float64
    assert squared_gaps(torch.ones(3, 2), all_pairs(1)).shape == (0,)


@every_method
def test_values_are_their_own_bounds_and_need_no_gradient(method):
    one, two = random_pair(0, 4, (7, 9))
    one.points.requires_grad_()
    result = method([one, two], PAIR)
    assert result.lower.item() == result.values.item() == result.upper.item()
    assert not result.values.requires_grad


@pytest.mark.parametrize(
    "method", [gaussian_distances, diagonal_gaussian_distances, upper_bound_distances]
)
def test_one_sample_is_a_point_with_zero_covariance(method):
    cloud, owl = random_cloud(5, 3), ClassCloud("'owl' of pets", torch.zeros(1, 3), None)
    mean, trace = cloud.points.double().mean(0), cloud.points.double().var(0).sum()
    expected = mean.square().sum() + trace
    torch.testing.assert_close(method([cloud, owl], PAIR).values, expected.reshape(1))


def test_progress_counts_all_pairs(monkeypatch):
    monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", 2**12)
    calls = []
    gaussian_distances(mixed_clouds(), all_pairs(17), progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {136}
    assert len(done) > 20
    assert list(done) == sorted(set(done))
    assert done[-1] == 136


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_a_pair_does_not_depend_on_the_others():
    clouds = [*mixed_clouds(40), *near_clouds(40, 32, 40)]
    on_gpu = [moved(cloud, cloud.points.cuda()) for cloud in clouds]
    pairs = all_pairs(len(clouds))
    expected = gaussian_distances(clouds, pairs).values
    values = gaussian_distances(on_gpu, pairs).values
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-11, atol=1e-11)
    for method in METHODS.values():
        check_independence(method, on_gpu)
