"""What must hold for class distances whatever the data: DESIGN's invariants, over all methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import decomposing_by

from otdd_flash.labels import (
    Exact,
    Gaussian,
    Means,
    UpperBound,
    classes,
    measure_classes,
    metric_named,
)
from otdd_flash.labels.classes import ClassCloud, merge_identical, split_classes
from otdd_flash.labels.many import class_distances
from otdd_flash.labels.moments import total_variances
from otdd_flash.samples import LabeledSamples

METRICS = {
    "gaussian": Gaussian(),
    "gaussian by products": Gaussian(),
    "gaussian biased": Gaussian(unbiased=False),
    "gaussian diagonal": Gaussian(diagonal=True),
    "means": Means(),
    "upper bound": UpperBound(),
    "exact": Exact(),
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
PROBLEMS = [(0, 1, 3, 1e-3), (2, 3, 1, 1e3), (4, 6, 4, 0.7), (6, 12, 2, 30.0)]


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


@pytest.mark.parametrize(
    ("method", "route"), [("gaussian", "lapack"), ("gaussian", "products"), ("means", "lapack")]
)
@pytest.mark.parametrize(("size", "dim"), [(40, 8), (8, 40), (33, 33)])
def test_equal_moments_give_zero_without_equal_content(method, route, size, dim):
    """Every sample twice has the same plain moments: only the arithmetic can make this zero."""
    rng = np.random.default_rng(size)
    points = torch.from_numpy(rng.normal(size=(size, dim)) * np.geomspace(1e-4, 1e2, dim))
    one = LabeledSamples(points, torch.zeros(size, dtype=torch.int64), ("only",))
    two = one.take(torch.arange(size).repeat(2))
    with decomposing_by(route):
        value = float(measure_classes(one, two, metric_named(method, {"unbiased": False})).xy)
    assert 0 <= value <= 1e-9 * float(points.var(0).sum())


@pytest.mark.parametrize("route", ["lapack", "products"])
def test_biased_gaussian_is_a_lower_bound_of_exact(route):
    for seed in range(3):
        dim, spread = 1 + seed, (0.1, 1.0, 10.0)[seed % 3]
        pair = random_samples(seed, dim, 3, smallest=1, scale=spread), random_samples(9, dim, 2)
        with decomposing_by(route):
            lower = measure_classes(*pair, Gaussian(unbiased=False)).full
        exact = measure_classes(*pair, Exact()).full
        upper = measure_classes(*pair, UpperBound(unbiased=False)).full
        slack = 1e-9 * spread**2
        assert bool((lower <= exact + slack).all()), seed
        assert bool((exact <= upper + slack).all()), seed


def test_a_table_over_many_datasets_holds_every_pair(metric):
    datasets = [random_samples(seed, 4, seed + 1) for seed in range(3)]
    joint = class_distances(datasets, metric)
    assert joint.offsets == (0, 1, 3, 6)
    for k, other in ((0, 1), (0, 2), (1, 2), (2, 0), (1, 1)):
        pair = measure_classes(datasets[k], datasets[other], metric)
        assert torch.equal(joint.between(k, other).full, pair.full)
        rows = slice(joint.offsets[k], joint.offsets[k + 1])
        columns = slice(joint.offsets[other], joint.offsets[other + 1])
        assert torch.equal(joint.full[rows, columns], pair.xy)


def test_a_pair_is_measured_alike_in_every_company(metric):
    """Whatever other classes there are, and in whatever order, to the last bit."""
    samples = random_samples(0, 6, 6, largest=9, smallest=7)
    whole = measure_classes(samples, random_samples(1, 6, 3), metric).xx
    for keep in ([0, 1], [4, 2], [5, 0, 3]):
        part = measure_classes(samples.keep_classes(keep), random_samples(2, 6, 1), metric).xx
        assert torch.equal(part, whole[keep][:, keep])


def test_classes_have_one_order_that_content_decides():
    """Distinct classes of equal size, extremes shared by two, in any order and twice."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(7, 3))
    halved = np.concatenate((points[:6] / 2, [points.min(0), points.max(0)]))
    turned = np.concatenate((-points[:6] / 2, [points.min(0), points.max(0)]))
    contents = [rng.normal(size=(8, 3)), halved, turned, rng.normal(size=(3, 3))]
    clouds = [ClassCloud(str(k), torch.from_numpy(rows), None) for k, rows in enumerate(contents)]
    assert clouds[1].outline == clouds[2].outline
    distinct, index = merge_identical(clouds)
    assert len(distinct) == 4
    assert [distinct[place].name for place in index] == ["0", "1", "2", "3"]
    for order in ([3, 2, 1, 0], [1, 2], [2, 1, 0, 2, 1]):
        again, places = merge_identical([clouds[k] for k in order])
        assert [cloud.name for cloud in again] == [
            cloud.name for cloud in distinct if int(cloud.name) in order
        ]
        assert [again[place].name for place in places] == [str(k) for k in order]


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


@pytest.mark.parametrize("method", ["gaussian", "means", "upper_bound", "exact"])
def test_whole_weights_count_as_repetitions(method):
    samples, other = random_samples(5, 3, 2), random_samples(6, 3, 2)
    repeats = torch.arange(len(samples)) % 3 + 1
    repeated = samples.take(torch.repeat_interleave(torch.arange(len(samples)), repeats))
    weighted = LabeledSamples(samples.features, samples.labels, samples.class_names, repeats)
    metric = metric_named(method, {"unbiased": False})
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


def test_far_away_classes_keep_the_digits_of_their_spread():
    """Moved by a power of two, sums of whole numbers are exact: only a mean far away has lost."""
    rng = np.random.default_rng(0)
    points, labels = torch.from_numpy(rng.integers(0, 9, (40, 3)) * 1.0), torch.arange(40) % 3
    here, far = (
        LabeledSamples(points + offset, labels, ("a", "b", "c")) for offset in (0.0, 2.0**40)
    )
    spreads = [total_variances(split_classes(samples), unbiased=True) for samples in (here, far)]
    torch.testing.assert_close(*spreads, rtol=1e-14, atol=0)


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
    draw, reads = torch.Generator().manual_seed(0), []
    clouds = [ClassCloud(str(k), torch.randn(3, 2, generator=draw), None) for k in range(20)]
    for name in ("cpu", "to", "tolist", "numpy"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, read=read: reads.append(read) or read(*args)
        )
    distinct, index = merge_identical([*clouds, clouds[3]])
    assert len(distinct) == 20
    assert index[3] == index[20]
    # To host memory, and as an array there; the doubled class is read to see that it is one.
    assert len(reads) <= 10


@pytest.mark.parametrize("together", [1, 20, 1 << 22])
def test_outlines_are_those_of_each_class_alone(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sizes and precisions, whichever are copied side by side; zeros have no sign."""
    monkeypatch.setattr(classes, "TOGETHER", together)
    draw = torch.Generator().manual_seed(0)
    points = [torch.randn(k % 3 + 1, 2, generator=draw) for k in range(12)]
    points[5:] = [each.double() for each in points[5:]]
    points[7][:, 0] = -0.0
    found = classes._outlines([ClassCloud(str(k), each, None) for k, each in enumerate(points)])
    for outline, each in zip(found, points, strict=True):
        extremes = torch.stack((each.amin(0), each.amax(0))).double() + 0.0
        assert outline == extremes.numpy().tobytes()
