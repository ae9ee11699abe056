"""The dataset distance: its value against dense float64 formulas, and what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from otdd_flash.errors import ConvergenceError, DataNotice, InputError, NotConvergedWarning
from otdd_flash.labels import ClassDistances, Gaussian, Means, NoLabels, measure_classes, metric_of
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules.converged import Converged

TIGHT = Converged(tolerance=1e-4)
DOUBLE = ComputeOptions(precision="double")


def clusters(size, seed, *, dim=3, classes=3, shift=0.0, weights=None, dtype=torch.float32):
    """Labelled Gaussian clusters; every class has at least two points if size >= 2 classes."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    centres = 2 * rng.normal(size=(classes, dim))
    features = torch.from_numpy(centres[labels] + rng.normal(size=(size, dim)) + shift).to(dtype)
    names = tuple("abcdefgh"[:classes])
    return LabeledSamples(features, torch.from_numpy(labels), names, weights, name=f"set{seed}")


@pytest.fixture
def pair():
    return clusters(31, 0), clusters(24, 1, classes=2, shift=1.0)


def random_weights(size, seed):
    weights = np.random.default_rng(seed).random(size) ** 2
    weights[::5] = 0
    return torch.from_numpy(weights)


def truth(source, target, table, epsilon, *, lambda_x=0.5, lambda_y=0.5, debias=True):
    """S_epsilon, or OT_epsilon, in float64 from the table of class distances."""
    sides = {"x": source, "y": target}
    costs = [
        reference.dense_cost(
            sides[one].features,
            sides[two].features,
            lambda_x,
            lambda_y * getattr(table, one + two),
            *(
                torch.zeros(len(side), dtype=torch.int64) if side.labels is None else side.labels
                for side in (sides[one], sides[two])
            ),
        )
        for one, two in ("xy", "xx", "yy")
    ]
    if debias:
        return reference.sinkhorn_divergence(tuple(costs), source.masses, target.masses, epsilon)
    return reference.entropic_transport(costs[0], source.masses, target.masses, epsilon)[0]


def assert_holds(result, expected, width=None):
    low, high = result.bounds
    assert low - 1e-9 <= expected <= high + 1e-9
    assert low <= result.value <= high
    if width is not None:
        assert high - low < width


def assert_same_distance(one, two):
    """Two computations of one number: each value lies in the other's interval."""
    for first, second in ((one, two), (two, one)):
        assert first.bounds[0] <= second.value <= first.bounds[1]
    assert one.bounds[1] - one.bounds[0] < 0.1 * abs(one.value)


@pytest.mark.slow(after=5)
@pytest.mark.parametrize("method", ["gaussian", "means", "upper_bound", "exact", "none"])
@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_the_dense_divergence_lies_in_the_bounds(pair, method, epsilon):
    result = dataset_distance(*pair, labels=method, epsilon=epsilon, solver=TIGHT)
    expected = truth(*pair, measure_classes(*pair, metric_of(method)), epsilon)
    assert_holds(result, expected, width=0.01)
    assert result.converged
    assert result.method == method


@pytest.mark.parametrize("lambdas", [(0.5, 0.0), (0.0, 1.0), (1.3, 0.2)])
def test_the_cost_weighs_features_and_classes(pair, lambdas):
    weights = dict(zip(("lambda_x", "lambda_y"), lambdas, strict=True))
    result = dataset_distance(*pair, epsilon=0.5, solver=TIGHT, **weights)
    assert_holds(result, truth(*pair, result.class_distances, 0.5, **weights), width=0.02)


def test_without_debiasing_the_value_is_the_transport_cost(pair):
    result = dataset_distance(*pair, epsilon=0.5, debias=False, solver=TIGHT)
    assert_holds(result, truth(*pair, result.class_distances, 0.5, debias=False), width=0.01)
    assert set(result.divergence.terms) == {"xy"}
    same = dataset_distance(pair[0], pair[0], epsilon=0.5, debias=False, solver=TIGHT)
    assert_holds(same, truth(pair[0], pair[0], same.class_distances, 0.5, debias=False))
    assert same.value > 0.1


def test_epsilon_can_be_relative_to_the_mean_cost(pair):
    source, target = pair
    result = dataset_distance(*pair, epsilon_relative=0.05)
    cost = reference.dense_cost(
        source.features,
        target.features,
        0.5,
        0.5 * result.class_distances.xy,
        source.labels,
        target.labels,
    )
    assert result.epsilon == pytest.approx(0.05 * float(cost.mean()), rel=1e-6)
    assert_same_distance(result, dataset_distance(*pair, epsilon=result.epsilon))


def test_double_precision_takes_float64_features():
    pair = clusters(20, 0, dtype=torch.float64), clusters(25, 1, dtype=torch.float64)
    solver = Converged(tolerance=1e-9)
    result = dataset_distance(*pair, epsilon=0.5, compute=DOUBLE, solver=solver)
    assert result.potentials[0].dtype == torch.float64
    assert_holds(result, truth(*pair, result.class_distances, 0.5), width=1e-6)
    assert result.value == pytest.approx(truth(*pair, result.class_distances, 0.5), rel=1e-10)


def test_unlabelled_data_are_compared_by_features_alone(pair):
    bare = [LabeledSamples(side.features, None, ()) for side in pair]
    result = dataset_distance(*bare, labels="none", epsilon=0.5, solver=TIGHT)
    expected = truth(*pair, measure_classes(*pair, NoLabels()), 0.5)
    assert_holds(result, expected, width=0.01)
    with pytest.raises(InputError, match=r"has no labels; label it with .*pseudo_labels=kmeans"):
        dataset_distance(bare[0], pair[1])


def test_given_class_distances_are_used(pair):
    table = measure_classes(*pair, Means())
    given = ClassDistances(2 * table.xx, 3 * table.xy, 2 * table.yy)
    result = dataset_distance(*pair, class_distances=given, epsilon=0.5, solver=TIGHT)
    assert_holds(result, truth(*pair, given, 0.5), width=0.05)
    assert result.method == "given"
    assert result.class_names == (("a", "b", "c"), ("a", "b"))
    with pytest.raises(InputError, match="3 source classes"):
        dataset_distance(pair[1], pair[0], class_distances=given)


def test_class_statistics_can_come_from_larger_datasets(pair):
    subsets = [side.take(torch.arange(12)) for side in pair]
    result = dataset_distance(*subsets, class_statistics=pair, epsilon=0.5)
    torch.testing.assert_close(result.class_distances.full, measure_classes(*pair, Gaussian()).full)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (9, 1)])
def test_one_sample_a_side(sizes):
    source, target = (clusters(size, seed, classes=1) for seed, size in enumerate(sizes))
    result = dataset_distance(source, target, labels="means", epsilon=0.5, solver=TIGHT)
    assert_holds(result, truth(source, target, result.class_distances, 0.5), width=0.01)


def test_one_class_a_side():
    """One pair of classes adds lambda_y W to every cross cost, and so to the value."""
    pair = clusters(20, 0, classes=1), clusters(25, 1, classes=1)
    plain = dataset_distance(*pair, labels="none", epsilon=0.5, solver=TIGHT)
    whole = dataset_distance(*pair, epsilon=0.5, solver=TIGHT)
    added = 0.5 * float(whole.class_distances.xy)
    assert added > 1
    assert_holds(whole, plain.value + added, width=0.01)


def moved(samples):
    return LabeledSamples(samples.features + 7.5, samples.labels, samples.class_names)


def renamed(samples):
    names = tuple(f"class {name}" for name in samples.class_names)
    return LabeledSamples(samples.features, samples.labels, names)


def renumbered(samples):
    order = list(reversed(range(samples.class_total)))
    return samples.keep_classes(order)


def shuffled(samples):
    rows = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3))
    return samples.take(rows)


@pytest.mark.parametrize("change", [moved, renamed, renumbered, shuffled])
def test_what_changes_nothing(pair, change):
    before = dataset_distance(*pair, epsilon=0.5, solver=TIGHT)
    after = dataset_distance(*(change(side) for side in pair), epsilon=0.5, solver=TIGHT)
    assert_same_distance(before, after)


def test_the_distance_is_symmetric(pair):
    forth = dataset_distance(*pair, epsilon=0.5, solver=TIGHT)
    back = dataset_distance(*reversed(pair), epsilon=0.5, solver=TIGHT)
    assert_same_distance(forth, back)
    torch.testing.assert_close(forth.class_distances.xy, back.class_distances.xy.T)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("labels", ["gaussian", "means", "none"])
def test_equal_datasets_are_at_zero(labels, weighted):
    once, again = (
        clusters(20, 0, weights=random_weights(20, 0) if weighted else None) for _ in range(2)
    )
    for other in (once, again, again.to("cpu")):
        result = dataset_distance(once, other, labels=labels, epsilon=0.5)
        assert (result.value, result.bounds) == (0.0, (0.0, 0.0))
        assert result.converged


def test_a_shuffled_copy_has_zero_within_its_bounds():
    once = clusters(40, 0, weights=random_weights(40, 0))
    result = dataset_distance(once, shuffled(once), epsilon=0.5)
    assert_holds(result, 0.0)
    assert result.bounds[0] < 0 < result.bounds[1]
    assert not result.divergence.identical


@pytest.mark.parametrize("factor", [9, 1 + 9e-7, 1 + 1e-12])
@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("block", ["xy", "yy"])
def test_equal_points_at_other_class_distances_are_not_equal_datasets(block, scale, factor):
    """Tables of any scale and any difference: a tolerance would prove 0 where it is not."""
    samples = clusters(12, 0, classes=2)
    samples = LabeledSamples(samples.features * scale**0.5, samples.labels, samples.class_names)
    apart = scale * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    blocks = {"xx": apart, "xy": apart, "yy": apart} | {block: factor * apart}
    table = ClassDistances(**blocks)
    result = dataset_distance(samples, samples, class_distances=table, epsilon=0.5 * scale)
    assert not result.divergence.identical
    assert_holds(result, truth(samples, samples, table, 0.5 * scale))
    assert result.bounds[0] < result.bounds[1]


def test_points_without_weight_change_nothing(pair):
    source, target = pair
    weights = random_weights(len(source), 4)
    heavy = LabeledSamples(source.features, source.labels, source.class_names, weights)
    result = dataset_distance(heavy, target, epsilon=0.5, solver=TIGHT)
    alone = dataset_distance(
        heavy.take(torch.nonzero(weights).squeeze(1)), target, epsilon=0.5, solver=TIGHT
    )
    assert_same_distance(result, alone)
    assert_holds(result, truth(heavy, target, result.class_distances, 0.5), width=0.01)


def test_whole_weights_count_as_repetitions(pair):
    source, target = pair
    counts = torch.arange(len(source)) % 3
    counted = LabeledSamples(source.features, source.labels, source.class_names, counts)
    repeated = source.take(torch.repeat_interleave(torch.arange(len(source)), counts))
    # Unbiased covariances tell the two apart, means do not.
    results = [
        dataset_distance(side, target, labels="means", epsilon=0.5, solver=TIGHT)
        for side in (counted, repeated)
    ]
    assert_same_distance(*results)


def test_small_classes_can_be_dropped(pair):
    labels = pair[0].labels.clone()
    labels[labels == 2] = 0
    labels[5] = 2
    source = LabeledSamples(pair[0].features, labels, pair[0].class_names)
    with pytest.warns(DataNotice, match="points, with covariance 0: 'c' of .*min_class_size=2"):
        whole = dataset_distance(source, pair[1], epsilon=0.5, solver=TIGHT)
    assert len(whole.source) == len(source)
    with pytest.warns(DataNotice, match=r"c \(1\)"):
        result = dataset_distance(source, pair[1], min_class_size=2, epsilon=0.5, solver=TIGHT)
    expected = dataset_distance(source.keep_classes([0, 1]), pair[1], epsilon=0.5, solver=TIGHT)
    assert_same_distance(result, expected)
    assert len(result.source) == len(source) - 1
    assert result.class_names[0] == ("a", "b")


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_stopping_early_is_said_and_still_brackets_the_truth(pair, iterations):
    hasty = Converged(tolerance=1e-4, max_iterations=iterations)
    with pytest.warns(NotConvergedWarning, match=rf"after {iterations} iterations in xy"):
        result = dataset_distance(*pair, epsilon=0.1, solver=hasty)
    assert (result.converged, result.divergence.stopped_by) == (False, "max_iterations")
    assert result.divergence.marginal_error > 1e-4
    assert_holds(result, truth(*pair, result.class_distances, 0.1))


def test_convergence_can_be_required(pair):
    strict = Converged(tolerance=1e-4, max_iterations=2, require_convergence=True)
    with pytest.raises(
        ConvergenceError, match=r"after 2 iterations in xy.*solver\.tolerance=0\.0001"
    ):
        dataset_distance(*pair, epsilon=0.1, solver=strict)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive and finite, got 0"),
        ({"epsilon": -1.0}, "epsilon must be positive and finite, got -1"),
        ({"epsilon": float("nan")}, "epsilon must be positive and finite, got nan"),
        ({"epsilon_relative": 0.0}, "epsilon_relative must be positive and finite, got 0"),
        ({"lambda_x": -1.0}, "lambda_x must be finite and not negative, got -1"),
        ({"lambda_y": float("inf")}, "lambda_y must be finite and not negative, got inf"),
        ({"lambda_x": 0.0, "lambda_y": 0.0}, "both 0"),
        ({"labels": "mean"}, "unknown labels.method 'mean'; choose one of: gaussian"),
        ({"min_class_size": 0}, "min_class_size must be at least 1, got 0"),
        ({"epsilon": 1e-5}, "too small for float32.*precision=double"),
    ],
)
def test_impossible_requests_are_refused(pair, arguments, message):
    with pytest.raises(InputError, match=message):
        dataset_distance(*pair, **arguments)


def test_different_dimensions_are_refused(pair):
    with pytest.raises(InputError, match=r"3 .*4|4 .*3"):
        dataset_distance(pair[0], clusters(20, 2, dim=4))


def test_relative_epsilon_needs_a_cost():
    point = LabeledSamples(torch.ones(1, 2), None, ())
    with pytest.raises(InputError, match="epsilon_relative needs a positive mean cost"):
        dataset_distance(point, point, labels="none", epsilon_relative=0.1)


def test_progress_hears_of_every_term(pair):
    heard = []
    dataset_distance(*pair, epsilon=0.5, progress=lambda *event: heard.append(event))
    assert {term for term, _, _ in heard} == {"xy", "xx", "yy"}
    steps = [(step, error) for term, step, error in heard if term == "xy"]
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    assert steps[-1][1] <= 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_a_little_mass_with_far_to_go_stays_in_the_bounds(seed):
    """Rounding hides an imbalance of two far points, whose transport is most of the value.

    The plan is [[1/2, h], [0, 1/2 - h]] but for a part exp(-600): its cost is known.
    """
    rng = np.random.default_rng(seed)
    half, excess = 0.5, 10 ** rng.uniform(-6.5, -4.5)
    centres = np.array([[300.0, 0, 0], [-300.0, 0, 0]])
    ends = [centres + rng.normal(size=(2, 3)) for _ in range(2)]
    masses = torch.tensor([half + excess, half - excess], dtype=torch.float64)
    source, target = (
        LabeledSamples(points.astype(np.float32), None, (), weights)
        for points, weights in zip(ends, (masses, None), strict=True)
    )
    result = dataset_distance(
        source,
        target,
        labels="none",
        epsilon=300.0,
        debias=False,
        solver=Converged(tolerance=3e-3),
    )
    plan = torch.tensor([[half, excess], [0.0, half - excess]], dtype=torch.float64)
    cost = reference.dense_cost(source.features, target.features)
    entropy = torch.xlogy(plan, plan / (masses.unsqueeze(1) * half)).sum()
    assert_holds(result, float((plan * cost).sum() + 300.0 * entropy))


def test_far_points_without_weight_neither_widen_nor_slow(pair):
    source, target = pair
    outlier = torch.full((1, 3), 1e6)
    weights = torch.cat((source.masses, torch.zeros(1)))
    features = torch.cat((source.features, outlier))
    labels = torch.cat((source.labels, torch.zeros(1, dtype=torch.int64)))
    far = LabeledSamples(features, labels, source.class_names, weights)
    with_it, without = (dataset_distance(side, target, epsilon=0.5) for side in (far, source))
    assert with_it.divergence.xy.iterations <= 2 * without.divergence.xy.iterations
    widths = [high - low for low, high in (with_it.bounds, without.bounds)]
    assert widths[0] <= 1.1 * widths[1]
    assert_same_distance(with_it, without)
