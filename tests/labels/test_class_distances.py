"""Distances between classes of two datasets: formulas, invariants of all methods, refusals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gaussian_cases import decomposing_by, every_route, squared_bures_wasserstein
from ring_package import shown_module
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from spying import calls_of

from otdd_flash.errors import DataNotice, InputError
from otdd_flash.labels import (
    Exact,
    Gaussian,
    Given,
    Means,
    Sinkhorn,
    UpperBound,
    measure_classes,
    metric_named,
)
from otdd_flash.labels.measuring import drop_small_classes
from otdd_flash.labels.pairs import ClassCloud, merge_identical, split_classes
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples

# Independent formulas and solvers.


def points_of(samples, index):
    return samples.features[samples.labels == index].numpy().astype(np.float64)


def by_pairs(source, target, formula):
    return np.array(
        [
            [
                formula(points_of(source, i), points_of(target, j))
                for j in range(len(target.class_names))
            ]
            for i in range(len(source.class_names))
        ]
    )


@pytest.mark.parametrize(
    ("sizes", "others", "unbiased", "route"),
    [
        ((60, 33), (45, 90), False, "products"),
        ((60, 33), (5, 9), True, "products"),
        ((7, 3), (5, 9), False, "lapack"),
        ((7, 3), (5, 9), True, "products"),
    ],
)
def test_gaussian_matches_dense_square_roots(blobs, sizes, others, unbiased, route):
    """By d x d triangles, by n x n products of points, and mixed."""
    source, target = blobs(sizes, 12), blobs(others, 12, seed=1)
    with decomposing_by(route):
        table = measure_classes(source, target, Gaussian(unbiased=unbiased))
    # The square root of a singular matrix is only good to half the digits.
    tolerance = 1e-11 if min(sizes + others) > 12 else 1e-6
    expected = by_pairs(
        source, target, lambda one, two: squared_bures_wasserstein(one, two, unbiased=unbiased)
    )
    np.testing.assert_allclose(table.xy.numpy(), expected, rtol=tolerance)


@pytest.mark.parametrize(
    ("dim", "diagonal", "route"),
    [(1, False, "lapack"), (1, False, "products"), (1, True, "lapack"), (6, True, "lapack")],
)
def test_deviations_are_compared_in_one_dimension_and_by_each(blobs, dim, diagonal, route):
    source, target = blobs((30, 4), dim), blobs((8, 50, 2), dim, seed=1)
    with decomposing_by(route):
        table = measure_classes(source, target, Gaussian(diagonal=diagonal))
    expected = by_pairs(
        source,
        target,
        lambda one, two: (
            ((one.mean(0) - two.mean(0)) ** 2).sum()
            + ((one.std(0, ddof=1) - two.std(0, ddof=1)) ** 2).sum()
        ),
    )
    np.testing.assert_allclose(table.xy.numpy(), expected, rtol=1e-12)


def test_float32_features_are_good_to_nine_digits():
    """With eigenvalues over ten decades, of which float32 square roots lose two percent."""
    rng = np.random.default_rng(0)
    scales = np.geomspace(1e-5, 1, 40)
    pair, points = [], []
    for size in (200, 300):
        turn = np.linalg.qr(rng.normal(size=(40, 40)))[0]
        points.append((rng.normal(size=(size, 40)) * scales @ turn).astype(np.float32))
        pair.append(LabeledSamples.from_arrays(points[-1], np.zeros(size, int)))
    table = measure_classes(*pair, Gaussian())
    expected = squared_bures_wasserstein(*(one.astype(np.float64) for one in points))
    assert float(table.xy) == pytest.approx(expected, rel=1e-9)


@every_route
def test_degenerate_covariances_are_nothing_special(route):
    """Orthogonal pieces share nothing: a line, a plane of doubled features, equal points."""
    points = torch.zeros(94, 30, dtype=torch.float64)
    points[:4, 0] = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    points[4:54, 1] = points[4:54, 2] = torch.linspace(-1, 1, 50).double()
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 50, 40]))
    samples = LabeledSamples(points, labels, ("line", "plane", "equal"))
    with decomposing_by(route):
        table = measure_classes(samples, samples, Gaussian()).xx
    variances = torch.stack([points[labels == k].var(0).sum() for k in range(3)])
    expected = (variances[:, None] + variances).fill_diagonal_(0)
    torch.testing.assert_close(table, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("source", "target", "metric", "value"),
    [
        # Quantile functions: 1/3 stay, 1/6 go 0 -> 1, 1/6 stay at 1, 1/3 go 1 -> 2.
        ([[0.0], [1.0]], [[0.0], [1.0], [2.0]], Exact(), 0.5),
        # Unbiased deviations are sqrt 2 times larger: no lower bound of the exact distance.
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Gaussian(), 2.0),
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Gaussian(unbiased=False), 1.0),
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Exact(), 1.0),
        # Single samples are points where no unbiased covariance is asked for.
        ([[0.0, 0.0]], [[3.0, 4.0]], Gaussian(unbiased=False), 25.0),
        ([[0.0, 0.0]], [[3.0, 4.0]], UpperBound(unbiased=False), 25.0),
    ],
)
def test_small_classes_have_closed_forms(source, target, metric, value):
    sides = [LabeledSamples.from_arrays(np.array(x), [0] * len(x)) for x in (source, target)]
    assert float(measure_classes(*sides, metric).xy) == pytest.approx(value)


@pytest.mark.parametrize("scale", [1, 1e-20, 1e-7, 1e20])
def test_exact_is_the_best_assignment_between_equal_classes(blobs, scale):
    source, target = (
        LabeledSamples(side.features.double() * scale, side.labels, side.class_names)
        for side in (blobs((17, 17), 5), blobs((17, 17), 5, seed=1))
    )

    def assignment(one, two):
        cost = cdist(one, two, "sqeuclidean")
        return cost[linear_sum_assignment(cost)].mean()

    table = measure_classes(source, target, Exact())
    np.testing.assert_allclose(table.xy.numpy(), by_pairs(source, target, assignment), rtol=1e-10)


# What must hold whatever the data.

METRICS = {
    "gaussian": Gaussian(),
    "gaussian by products": Gaussian(),
    "gaussian biased": Gaussian(unbiased=False),
    "gaussian diagonal": Gaussian(diagonal=True),
    "means": Means(),
    "upper bound": UpperBound(),
    "exact": Exact(),
    "shrunk, of docs/extending.md": shown_module("shrunk").Shrunk(),
}


SLOW = "gaussian by products"


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name == SLOW)) for name in METRICS]
)
def metric(request):
    """Each in turn, with decompositions as on the CPU, or by matrix products as on a GPU."""
    with decomposing_by("products" if request.param == SLOW else "lapack"):
        yield METRICS[request.param]


def random_samples(seed, dim, classes, *, largest=9, smallest=2, scale=1.0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(smallest, largest + 1, classes)
    labels = rng.permutation(np.repeat(np.arange(classes), sizes))
    centres = rng.normal(size=(classes, dim))
    features = scale * (centres[labels] + rng.normal(size=(len(labels), dim)))
    return LabeledSamples.from_arrays(torch.from_numpy(features), labels)


def moved(samples, features):
    return LabeledSamples(features, samples.labels, samples.class_names, samples.weights)


# Seeds, dimensions, classes and factors of features.
PROBLEMS = [(0, 1, 3, 1e-3), (6, 12, 2, 30.0)]


@pytest.mark.parametrize(("seed", "dim", "classes", "factor"), PROBLEMS)
def test_symmetric_and_of_squared_features_wherever_they_are(metric, seed, dim, classes, factor):
    pair = random_samples(seed, dim, classes), random_samples(seed + 1, dim, 2)
    table = measure_classes(*pair, metric).full
    assert torch.equal(table, table.T)
    assert torch.equal(table.diagonal(), torch.zeros(classes + 2, dtype=torch.float64))
    assert float(table.min()) >= 0
    # Not only but for rounding: any two classes are measured in one direction.
    assert torch.equal(measure_classes(*pair[::-1], metric).xy.T, table[:classes, classes:])
    rng = np.random.default_rng(seed)
    shift, order = torch.from_numpy(rng.normal(scale=10, size=dim)), rng.permutation
    shuffled = [
        moved(each, each.features + shift).take(torch.from_numpy(order(len(each)))) for each in pair
    ]
    found = measure_classes(*shuffled, metric).full
    torch.testing.assert_close(found, table, rtol=1e-8, atol=1e-9)
    scaled = [moved(each, factor * each.features) for each in pair]
    found = measure_classes(*scaled, metric).full / factor**2
    torch.testing.assert_close(found, table, rtol=1e-8, atol=1e-9)


def test_identical_classes_in_any_order_are_at_exactly_zero(metric):
    for dtype in (torch.float32, torch.float64):
        samples = random_samples(3, 6, 3, largest=30)
        samples = moved(samples, samples.features.to(dtype))
        shuffled = samples.take(torch.randperm(len(samples), generator=torch.manual_seed(0)))
        cross = measure_classes(samples, shuffled, metric).xy
        assert torch.equal(cross.diagonal(), torch.zeros(3, dtype=torch.float64)), dtype
        assert float((cross + torch.eye(3)).min()) > 0.01, dtype


def test_a_pair_is_measured_alike_in_every_company(metric):
    """Whatever other classes there are, and in whatever order, to the last bit."""
    samples = random_samples(0, 6, 6, largest=9, smallest=7)
    whole = measure_classes(samples, random_samples(1, 6, 3), metric).xx
    for keep in ([4, 2], [5, 0, 3]):
        part = measure_classes(samples.keep_classes(keep), random_samples(2, 6, 1), metric).xx
        assert torch.equal(part, whole[keep][:, keep])


def test_uniform_weights_are_no_weights_and_zero_weights_no_points(metric):
    pair = random_samples(1, 4, 2), random_samples(2, 4, 3)
    plain = measure_classes(*pair, metric).full
    weighted = []
    for samples in pair:
        n, extra = len(samples), samples.take(torch.tensor([0, 1]))
        weighted.append(
            LabeledSamples(
                torch.cat((samples.features, 100 * extra.features)),
                torch.cat((samples.labels, extra.labels)),
                samples.class_names,
                torch.cat((torch.ones(n), torch.zeros(2))),
            )
        )
    assert torch.equal(measure_classes(*weighted, metric).full, plain)


@pytest.mark.parametrize("method", ["gaussian", "means", "upper_bound", "exact", "sinkhorn"])
def test_whole_weights_count_as_repetitions(method):
    samples, other = random_samples(5, 3, 2), random_samples(6, 3, 2)
    repeats = torch.arange(len(samples)) % 3 + 1
    repeated = samples.take(torch.repeat_interleave(torch.arange(len(samples)), repeats))
    weighted = LabeledSamples(samples.features, samples.labels, samples.class_names, repeats)
    metric = metric_named(method, {"unbiased": False, "epsilon": 5.0, "tolerance": 1e-9})
    torch.testing.assert_close(
        measure_classes(weighted, other, metric).full, measure_classes(repeated, other, metric).full
    )


def test_reliability_weights_correct_the_covariance():
    """Two weighted points at +-1: S = sum w (x - m)^2 / (1 - sum w^2) is 2 for every weight."""
    points = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    labels = torch.zeros(2, dtype=torch.int64)
    for light in (0.5, 0.2, 1e-3, 1e-9, 1e-16, 1e-25, 1e-40):
        weights = torch.tensor([1 - light, light], dtype=torch.float64)
        weighted = LabeledSamples(points, labels, ("a",), weights)
        one = LabeledSamples(points[:1].repeat(2, 1), labels, ("b",))
        table = measure_classes(weighted, one, Gaussian())
        assert float(table.xy) == pytest.approx((2 * light) ** 2 + 2, rel=1e-14)


def test_weights_that_differ_tell_classes_apart():
    """Classes of the same points: what moves is the difference of the weights, however small."""
    points, labels = torch.tensor([[0.0], [1.0]]), torch.zeros(2, dtype=torch.int64)
    for light in (1e-3, 1e-8, 1e-11):
        one, two = (
            LabeledSamples(points, labels, ("a",), np.array([0.25 + more, 0.75 - more]))
            for more in (0.0, light)
        )
        assert float(measure_classes(one, two, Exact()).xy) == pytest.approx(light, rel=1e-4)


def test_the_same_weights_in_datasets_of_other_masses_are_one_class(metric):
    """They are normalised twice, and differ in their last digits."""
    one, more = random_samples(0, 3, 1, largest=30), random_samples(1, 3, 1)
    weights = torch.from_numpy(np.random.default_rng(2).uniform(0.1, 1, len(one)))
    both = LabeledSamples(
        torch.cat((more.features, one.features.flip(0))),
        torch.cat((more.labels + 1, one.labels)),
        ("same", "other"),
        torch.cat((torch.full((len(more),), 0.3, dtype=torch.float64), weights.flip(0))),
    )
    alone = LabeledSamples(one.features, one.labels, ("same",), weights)
    cross = measure_classes(alone, both, metric).xy
    assert float(cross[0, 0]) == 0 < float(cross[0, 1])


def test_outlines_of_all_classes_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for once, and not for every class."""
    draw = torch.Generator().manual_seed(0)
    clouds = [ClassCloud(str(k), torch.randn(3, 2, generator=draw), None) for k in range(20)]
    names = "cpu", "to", "tolist", "numpy"
    reads = [calls_of(monkeypatch, torch.Tensor, name) for name in names]
    distinct, index = merge_identical([*clouds, clouds[3]])
    assert len(distinct) == 20
    assert index[3] == index[20]
    # To host memory, and as an array there; the doubled class is read to see that it is one.
    assert sum(map(len, reads)) <= 10


# What is refused, and what is said.


def lone_class():
    return LabeledSamples.from_arrays(np.eye(3), ["cat", "cat", "owl"], name="pets")


def unlabelled():
    return LabeledSamples(torch.eye(3), None, (), name="cells")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gauss", {}, "unknown labels.method 'gauss'; choose one of: gaussian, sinkhorn"),
        ("sinkhorn", {"epsilon": 0}, "labels.epsilon must be positive and finite, got 0"),
        (
            "sinkhorn",
            {"epsilon": 1, "tolerance": -1},
            "labels.tolerance must be positive and finite, got -1",
        ),
        ("given", {}, "labels.path"),
    ],
)
def test_impossible_metrics_are_refused(name, parameters, message):
    with pytest.raises(InputError, match=message):
        metric_named(name, parameters)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (Gaussian(), 1),
        (Gaussian(unbiased=False), 0),
        (Means(), 0),
        (Sinkhorn(epsilon=1.0), 0),
    ],
)
def test_classes_of_one_sample_are_told_of_once(metric, told):
    samples = lone_class()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset_distance(samples, samples, labels=metric, epsilon=1.0)
    said = [str(entry.message) for entry in caught if entry.category is DataNotice]
    assert len(said) == told
    assert all("'owl' of pets" in text and "min_class_size=2" in text for text in said)


GAPS = ("a", "empty", "c")
SPARSE = LabeledSamples(torch.eye(2), torch.tensor([0, 2]), GAPS, name="gaps")
WEIGHTED = LabeledSamples(torch.eye(2), torch.tensor([0, 1]), GAPS[:2], [1, 0], name="gaps")
UNLABELLED = r"cells has no labels; label it with .*pseudo_labels=kmeans"
EMPTY = "'empty' of gaps has no sample of positive weight"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda two, _: measure_classes(two, unlabelled(), Gaussian()), UNLABELLED),
        (lambda two, _: measure_classes(two, unlabelled(), Exact()), UNLABELLED),
        (
            lambda two, _: measure_classes(
                two, unlabelled(), Given(measure_classes(two, two, Means()))
            ),
            UNLABELLED,
        ),
        (
            lambda two, five: measure_classes(two, five, Gaussian()),
            r"left has 2 features and right has 5.*extractor=pixels",
        ),
        (lambda *_: split_classes(SPARSE), EMPTY),
        (lambda *_: split_classes(WEIGHTED), EMPTY),
        (
            lambda two, _: measure_classes(
                two, two, Gaussian(), statistics=(two.keep_classes([0]), two)
            ),
            "come from left, which has no class 1 of left",
        ),
        (
            lambda *_: drop_small_classes(lone_class(), 9),
            r"min_class_size=9 leaves no class of pets.*cat \(2\), owl",
        ),
        (lambda *_: drop_small_classes(lone_class(), 0), "must be at least 1, got 0"),
    ],
)
def test_what_is_refused(blobs, call, message):
    with pytest.raises(InputError, match=message):
        call(blobs((3, 4), 2, name="left"), blobs((3,), 5, name="right"))


def test_small_classes_go_with_a_notice_that_names_them_and_empty_ones_silently():
    with pytest.warns(DataNotice, match=r"classes of pets with fewer than 2 .*: owl \(1\)"):
        kept = drop_small_classes(lone_class(), 2)
    assert kept.class_names == ("cat",)
    assert kept.labels.tolist() == [0, 0]
    assert measure_classes(kept, kept, Gaussian()).xx.tolist() == [[0.0]]
    # Only samples with weight count.
    samples = LabeledSamples(torch.eye(4), torch.tensor([0, 0, 1, 1]), ("a", "b"), [1, 1, 1, 0])
    with pytest.warns(DataNotice, match=r"b \(1\)"):
        assert drop_small_classes(samples, 2).class_names == ("a",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drop_small_classes(SPARSE, None).class_names == ("a", "c")
        assert drop_small_classes(unlabelled(), 5).labels is None
        assert len(drop_small_classes(lone_class(), None)) == 3
