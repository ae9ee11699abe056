"""W between moved classes and a fixed target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_flows import blobs

import otdd_flash as otdd
from otdd_flash.flows.modes import feature_driven
from otdd_flash.flows.modes.feature_driven import ClassTable
from otdd_flash.labels import LabelMetric, covariance_factors, measure_classes
from otdd_flash.labels.classes import ClassCloud, pool
from otdd_flash.labels.gaussian import gaussian_table
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.samples import LabeledSamples

METRICS = [
    otdd.labels.Gaussian(),
    otdd.labels.Gaussian(diagonal=True),
    otdd.labels.Means(),
    otdd.labels.UpperBound(),
    otdd.labels.Exact(),
    otdd.labels.Sinkhorn(epsilon=1.0),
]
SOURCE, TARGET = blobs(13, classes=2), blobs(17, seed=1, classes=3)
MOVED = replace(SOURCE, features=SOURCE.features + 0.5)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.name}")
def test_remeasured_distances_are_those_of_measuring_everything(
    metric: LabelMetric,
) -> None:
    before = measure_classes(SOURCE, TARGET, metric)
    afresh = measure_classes(MOVED, TARGET, metric)
    after = ClassTable(TARGET, metric).remeasured(MOVED, before)
    assert torch.equal(after.full, afresh.full)
    assert (after.names_x, after.names_y) == (before.names_x, before.names_y)


def weighted(samples: LabeledSamples) -> LabeledSamples:
    """With weights of their own; a few are 0."""
    weights = torch.rand(len(samples), generator=torch.Generator().manual_seed(7))
    weights[::6] = 0
    return replace(samples, weights=weights)


TARGETS = {
    # Of more points than features, of fewer, and of both.
    "tall": blobs(23, d=5, seed=1, classes=3),
    "wide": blobs(23, d=40, seed=1, classes=3),
    "weighted": weighted(blobs(40, d=9, seed=1, classes=4)),
    "single": replace(
        blobs(23, d=5, seed=1, classes=3),
        features=blobs(23, d=5, seed=1, classes=3).features.float(),
    ),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_what_is_kept_of_the_target_changes_no_bit(target: LabeledSamples) -> None:
    metric = otdd.labels.Gaussian()
    source = blobs(31, d=target.dim, classes=2)
    source = replace(source, features=source.features.to(target.features.dtype))
    table = measure_classes(source, target, metric)
    keeping = ClassTable(target, metric)
    for step in range(3):
        moved = replace(source, features=source.features * (1 + 0.1 * step) - step)
        table = keeping.remeasured(moved, table)
        assert torch.equal(table.full, measure_classes(moved, target, metric).full)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_gradients_are_those_of_measuring_everything_to_the_last_bit(
    target: LabeledSamples,
) -> None:
    source = blobs(31, d=target.dim, classes=2)
    source = replace(source, features=source.features.to(target.features.dtype))
    keeping = ClassTable(target, otdd.labels.Gaussian())
    within = torch.zeros(target.class_total, target.class_total)
    for step in range(2):
        moving = (source.features + step).requires_grad_()
        particles = replace(source, features=moving)
        clouds, (_, own, total) = pool([particles, target])
        pairs = all_pairs(total)[(all_pairs(total) < own).any(1)]
        expected = gaussian_table(clouds, pairs)
        found = keeping.differentiable(particles, within)
        assert torch.equal(found[pairs[:, 0], pairs[:, 1]], expected)
        (gradient,) = torch.autograd.grad(expected.sum(), moving)
        (kept_gradient,) = torch.autograd.grad(found.sum() / 2, moving)
        assert torch.equal(kept_gradient, gradient)


@pytest.fixture
def factored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes whose covariances were factored, in turn."""
    names: list[str] = []
    factor = covariance_factors.covariance_factor

    def noting(cloud: ClassCloud, unbiased: bool) -> torch.Tensor:
        names.append(cloud.name)
        return factor(cloud, unbiased)

    monkeypatch.setattr(covariance_factors, "covariance_factor", noting)
    return names


@pytest.mark.parametrize("differentiable", [False, True])
def test_covariances_of_the_target_are_factored_once(
    factored: list[str], differentiable: bool
) -> None:
    metric = otdd.labels.Gaussian()
    target = replace(TARGET, name="target")
    before = measure_classes(SOURCE, target, metric)
    factored.clear()
    keeping = ClassTable(target, metric)
    assert factored == []
    for _ in range(3):
        if differentiable:
            keeping.differentiable(MOVED, before.yy)
        else:
            keeping.remeasured(MOVED, before)
    assert sum(name.endswith(" of target") for name in factored) == 3
    assert len(factored) == 3 + 3 * 2


def test_what_is_kept_is_no_larger_than_factors_have_to_be() -> None:
    for target in (blobs(90, d=5, classes=3), blobs(23, d=40, classes=3)):
        keeping = ClassTable(target, otdd.labels.Gaussian())
        keeping.differentiable(target, torch.zeros(target.class_total, target.class_total))
        assert keeping._kept is not None
        held = {part.untyped_storage().data_ptr(): part for one in keeping._kept for part in one}
        numbers = sum(part.untyped_storage().nbytes() for part in held.values()) / 8
        rows = sum(min(count, target.dim) for count in target.class_counts.tolist())
        # Means, traces, and up to 3 rows of zeros below a factor.
        assert numbers <= rows * target.dim + target.class_total * (4 * target.dim + 1)


@pytest.mark.parametrize(
    ("metric", "name"),
    [(METRICS[0], "moments_table"), (METRICS[1], "measure_pairs")],
    ids=["full", "diagonal"],
)
def test_pairs_within_the_target_are_not_measured_again(
    metric: LabelMetric, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measure_classes(SOURCE, TARGET, metric)
    counted: list[int] = []

    measure = getattr(feature_driven, name)

    def counting(classes: object, pairs: torch.Tensor, *options: object) -> object:
        counted.append(len(pairs))
        return measure(classes, pairs, *options)

    monkeypatch.setattr(feature_driven, name, counting)
    ClassTable(TARGET, metric).remeasured(MOVED, before)
    assert counted == [1 + 2 * 3]


@pytest.mark.parametrize("metric", [METRICS[0], METRICS[-1]], ids=["gaussian", "sinkhorn"])
def test_a_class_that_meets_its_double_is_at_no_distance_from_it(
    metric: LabelMetric,
) -> None:
    before = measure_classes(SOURCE, SOURCE, metric)
    table = ClassTable(SOURCE, metric).remeasured(SOURCE, before)
    assert torch.equal(table.full, before.full)
    assert table.xy.diagonal().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["none", "given"])
def test_tables_that_points_do_not_decide_stay(method: str) -> None:
    table = measure_classes(SOURCE, TARGET, otdd.labels.Gaussian())
    metric = otdd.labels.metric_named(method, {"table": table})
    assert ClassTable(TARGET, metric).remeasured(MOVED, table) is table


@pytest.mark.parametrize("metric", METRICS[:3], ids=["full", "diagonal", "means"])
def test_the_differentiable_table_has_the_values_and_their_gradients(
    metric: LabelMetric,
) -> None:
    small, target = blobs(8, 2), blobs(8, 2, seed=1)
    whole = measure_classes(small, target, metric)
    moving = small.features.clone().requires_grad_()
    keeping = ClassTable(target, metric)

    def table(features: torch.Tensor) -> torch.Tensor:
        # Samples are checked on the way in, so autograd has to find the features in them.
        return keeping.differentiable(replace(small, features=features), whole.yy)

    torch.testing.assert_close(table(moving).detach(), whole.full, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(table, moving)
