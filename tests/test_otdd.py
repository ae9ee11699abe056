"""The dataset distance: its value against dense float64 formulas, and what must not change it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch

from otdd_flash.errors import ConvergenceError, DataNotice, InputError, NotConvergedWarning
from otdd_flash.labels import ClassDistances, Gaussian, Means, Sinkhorn, measure_classes, metric_of
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged

TIGHT = Converged(tolerance=1e-4)


def clusters(size, seed, *, dim=3, classes=3, shift=0.0):
    """Labelled Gaussian clusters; every class has at least two points if size >= 2 classes."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    centres = 2 * rng.normal(size=(classes, dim))
    features = (centres[labels] + rng.normal(size=(size, dim)) + shift).astype(np.float32)
    return LabeledSamples(features, labels, tuple("abcdefgh"[:classes]), name=f"set {seed}")


def some_zeros(size, seed):
    weights = np.random.default_rng(seed).random(size) ** 2
    weights[::5] = 0
    return torch.from_numpy(weights)


SOURCE, TARGET = PAIR = clusters(21, 0), clusters(16, 1, classes=2, shift=1.0)
BARE = [LabeledSamples(side.features, None, ()) for side in PAIR]
HEAVY = replace(SOURCE, weights=some_zeros(21, 4))
POINT = clusters(1, 0, classes=1), clusters(9, 1, classes=1)
MEANS = measure_classes(*PAIR, Means())
GIVEN = ClassDistances(2 * MEANS.xx, 3 * MEANS.xy, 2 * MEANS.yy)


def truth(source, target, table, epsilon, *, lambda_x=0.5, lambda_y=0.5, debias=True):
    """S_epsilon, or OT_epsilon, in float64 from the table of class distances."""
    points = []
    for side, first in ((source, 0), (target, len(table.xx))):
        labels = torch.zeros(len(side)).long() if side.labels is None else side.labels
        points.append((side.features, labels + first))
    costs = tuple(
        reference.dense_cost(one[0], two[0], lambda_x, lambda_y * table.full, one[1], two[1])
        for one, two in ((points[0], points[1]), (points[0],) * 2, (points[1],) * 2)
    )
    if debias:
        return reference.sinkhorn_divergence(costs, source.masses, target.masses, epsilon)
    return reference.entropic_transport(costs[0], source.masses, target.masses, epsilon)[0]


def assert_holds(result, expected, width=np.inf):
    low, high = result.bounds
    assert low - 1e-9 <= expected <= high + 1e-9
    assert low <= result.value <= high
    assert high - low < width


def assert_same_distance(one, two):
    """Two computations of one number: each value lies in the other's interval."""
    for first, second in ((one, two), (two, one)):
        assert first.bounds[0] <= second.value <= first.bounds[1]
    assert one.bounds[1] - one.bounds[0] < 0.1 * abs(one.value)


@pytest.mark.parametrize(
    ("pair", "epsilon", "options"),
    [
        (PAIR, 0.1, {}),
        (PAIR, 0.5, {"labels": "means", "lambda_x": 0.0, "lambda_y": 1.0}),
        (PAIR, 0.5, {"debias": False, "lambda_x": 1.3, "lambda_y": 0.2}),
        (BARE, 0.5, {"labels": "none"}),
        ((HEAVY, TARGET), 0.5, {}),
        (PAIR, 0.5, {"class_distances": GIVEN}),
        (POINT, 0.5, {"labels": "means"}),
        pytest.param(PAIR, 0.5, {"labels": "exact"}, marks=pytest.mark.slow),
        pytest.param((SOURCE, SOURCE), 0.5, {"debias": False}, marks=pytest.mark.slow),
        pytest.param(POINT[::-1], 0.5, {"labels": "means"}, marks=pytest.mark.slow),
    ],
)
def test_the_dense_value_lies_in_the_bounds(pair, epsilon, options):
    result = dataset_distance(*pair, epsilon=epsilon, solver=TIGHT, **options)
    method = "given" if "class_distances" in options else options.get("labels", "gaussian")
    table = GIVEN if method == "given" else measure_classes(*pair, metric_of(method))
    weights = {key: value for key, value in options.items() if key[:3] in ("lam", "deb")}
    assert_holds(result, truth(*pair, table, epsilon, **weights), width=0.05)
    assert result.converged
    assert result.method == method
    if pair is not BARE:
        assert result.class_names == tuple(side.class_names for side in pair)


def test_features_and_class_distances_are_squared():
    """1/2 ||x - y||^2 + 1/2 W, and both are the squared distance."""
    one, two = (
        LabeledSamples(torch.full((2, 1), place), torch.tensor([0, 1]), ("a", "b"))
        for place in (0.0, 2.0)
    )
    assert dataset_distance(one, two, labels="means").value == pytest.approx(4.0, rel=1e-5)


def test_class_statistics_can_come_from_larger_datasets():
    subsets = [side.take(torch.arange(12)) for side in PAIR]
    result = dataset_distance(*subsets, class_statistics=PAIR, epsilon=3.0)
    torch.testing.assert_close(result.class_distances.full, measure_classes(*PAIR, Gaussian()).full)


def shuffled(samples):
    return samples.take(torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)))


def moved(samples):
    """Shifted, with its classes in another order and its rows shuffled."""
    shifted = LabeledSamples(samples.features + 7.5, samples.labels, samples.class_names)
    return shuffled(shifted.keep_classes(list(reversed(range(samples.class_total)))))


COUNTS = torch.arange(len(SOURCE)) % 3
REPEATED = SOURCE.take(torch.repeat_interleave(torch.arange(len(SOURCE)), COUNTS))


@pytest.mark.parametrize(
    ("one", "two", "labels"),
    [
        (PAIR, (moved(TARGET), moved(SOURCE)), "gaussian"),
        ((HEAVY, TARGET), (HEAVY.take(torch.nonzero(HEAVY.masses).squeeze(1)), TARGET), "gaussian"),
        # Unbiased covariances tell repetitions from weights, means do not.
        ((replace(SOURCE, weights=COUNTS), TARGET), (REPEATED, TARGET), "means"),
    ],
    ids=["moved and turned", "zero weights", "repetitions"],
)
def test_what_changes_nothing(one, two, labels):
    settings = {"labels": labels, "epsilon": 1.0, "solver": TIGHT}
    assert_same_distance(*(dataset_distance(*pair, **settings) for pair in (one, two)))


@pytest.mark.parametrize("labels", ["gaussian", Sinkhorn(epsilon=0.5)], ids=str)
def test_equal_datasets_are_at_zero(labels):
    for other in (HEAVY, replace(HEAVY, features=HEAVY.features.clone())):
        result = dataset_distance(HEAVY, other, labels=labels, epsilon=0.5)
        assert (result.value, result.bounds) == (0.0, (0.0, 0.0))
        assert result.converged


def test_a_shuffled_copy_has_zero_within_its_bounds():
    result = dataset_distance(HEAVY, shuffled(HEAVY), epsilon=0.5)
    assert_holds(result, 0.0)
    assert result.bounds[0] < 0 < result.bounds[1]
    assert not result.divergence.identical


@pytest.mark.parametrize(
    ("block", "scale", "factor"), [("xy", 1e-9, 1 + 1e-12), ("yy", 1.0, 1 + 1e-12)]
)
def test_equal_points_at_other_class_distances_are_not_equal_datasets(block, scale, factor):
    """Tables of any scale and any difference: a tolerance would prove 0 where it is not."""
    samples = clusters(12, 0, classes=2)
    samples = replace(samples, features=samples.features * scale**0.5)
    apart = scale * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    table = ClassDistances(**({"xx": apart, "xy": apart, "yy": apart} | {block: factor * apart}))
    result = dataset_distance(samples, samples, class_distances=table, epsilon=0.5 * scale)
    assert not result.divergence.identical
    assert_holds(result, truth(samples, samples, table, 0.5 * scale))
    assert result.bounds[0] < result.bounds[1]


def test_small_classes_can_be_dropped():
    labels = torch.where(SOURCE.labels == 2, 0, SOURCE.labels)
    labels[5] = 2
    source = replace(SOURCE, labels=labels)
    with pytest.warns(DataNotice, match="points, with covariance 0: 'c' of .*min_class_size=2"):
        dataset_distance(source, TARGET, epsilon=3.0)
    with pytest.warns(DataNotice, match=r"c \(1\)"):
        result = dataset_distance(source, TARGET, min_class_size=2, epsilon=3.0)
    expected = dataset_distance(source.keep_classes([0, 1]), TARGET, epsilon=3.0)
    assert_same_distance(result, expected)
    assert result.class_names[0] == ("a", "b")


def test_stopping_early_is_said_and_still_brackets_the_truth():
    hasty = {"tolerance": 1e-4, "max_iterations": 2}
    with pytest.warns(NotConvergedWarning, match="after 2 iterations in xy"):
        result = dataset_distance(*PAIR, epsilon=0.1, solver=Converged(**hasty))
    assert (result.converged, result.divergence.stopped_by) == (False, "max_iterations")
    assert_holds(result, truth(*PAIR, result.class_distances, 0.1))
    strict = Converged(**hasty, require_convergence=True)
    message = r"after 2 iterations in xy.*solver\.tolerance=0\.0001"
    with pytest.raises(ConvergenceError, match=message):
        dataset_distance(*PAIR, epsilon=0.1, solver=strict)


@pytest.mark.parametrize(
    ("pair", "arguments", "message"),
    [
        (PAIR, {"epsilon": -0.1}, "epsilon must be finite and not negative, got -0.1"),
        (PAIR, {"epsilon_relative": -1.0}, "epsilon_relative must be finite and not neg.*, got -1"),
        (PAIR, {"lambda_x": -1.0}, "lambda_x must be finite and not negative, got -1"),
        (PAIR, {"lambda_x": 0.0, "lambda_y": 0.0}, "both 0"),
        (PAIR, {"labels": "mean"}, "unknown labels.method 'mean'; choose one of: gaussian"),
        (PAIR, {"min_class_size": 0}, "min_class_size must be at least 1, got 0"),
        (PAIR, {"epsilon": 1e-5}, "too small for float32.*precision=double"),
        ((TARGET, SOURCE), {"class_distances": GIVEN}, "3 source classes"),
        ((SOURCE, clusters(20, 2, dim=4)), {}, r"3 .*4|4 .*3"),
        ((BARE[0], TARGET), {}, r"has no labels; label it .*pseudo_labels=kmeans.*labels=none"),
    ],
)
def test_impossible_requests_are_refused(pair, arguments, message):
    with pytest.raises(InputError, match=message):
        dataset_distance(*pair, **arguments)


def test_progress_hears_of_every_term():
    heard = []
    dataset_distance(*PAIR, epsilon=0.5, progress=lambda *event: heard.append(event))
    assert {term for term, _, _ in heard} == {"xy", "xx", "yy"}
    steps = [(step, error) for term, step, error in heard if term == "xy"]
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    assert steps[-1][1] <= 1e-3


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(12))
def test_a_little_mass_with_far_to_go_stays_in_the_bounds(seed):
    """Rounding hides an imbalance of two far points, whose transport is most of the value.

    The plan is [[1/2, h], [0, 1/2 - h]] but for a part exp(-600): its cost is known.
    """
    rng = np.random.default_rng(seed)
    half, excess = 0.5, 10 ** rng.uniform(-6.5, -4.5)
    centres = np.array([[300.0, 0, 0], [-300.0, 0, 0]])
    masses = torch.tensor([half + excess, half - excess], dtype=torch.float64)
    source, target = (
        LabeledSamples((centres + rng.normal(size=(2, 3))).astype(np.float32), None, (), weights)
        for weights in (masses, None)
    )
    settings = {"labels": "none", "debias": False, "solver": Converged(tolerance=3e-3)}
    result = dataset_distance(source, target, epsilon=300.0, **settings)
    plan = torch.tensor([[half, excess], [0.0, half - excess]], dtype=torch.float64)
    cost = reference.dense_cost(source.features, target.features)
    entropy = torch.xlogy(plan, plan / (masses.unsqueeze(1) * half)).sum()
    assert_holds(result, float((plan * cost).sum() + 300.0 * entropy))


@pytest.mark.slow
def test_far_points_without_weight_neither_widen_nor_slow():
    names, labels = SOURCE.class_names, torch.cat((SOURCE.labels, torch.zeros(1).long()))
    features = torch.cat((SOURCE.features, torch.full((1, 3), 1e6)))
    far = LabeledSamples(features, labels, names, torch.cat((SOURCE.masses, torch.zeros(1))))
    with_it, without = (dataset_distance(side, TARGET, epsilon=0.5) for side in (far, SOURCE))
    assert with_it.divergence.xy.iterations <= 2 * without.divergence.xy.iterations
    widths = [high - low for low, high in (with_it.bounds, without.bounds)]
    assert widths[0] <= 1.1 * widths[1]
    assert_same_distance(with_it, without)
