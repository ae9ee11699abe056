"""W between moved classes and a fixed target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_flows import CPU, blobs

import otdd_flash as otdd
from otdd_flash.flows import class_table
from otdd_flash.flows.class_table import differentiable_table, remeasured
from otdd_flash.labels import measure_classes
from otdd_flash.labels.measuring import measure_pairs

METRICS = [
    otdd.LabelMetric(),
    otdd.LabelMetric(diagonal=True),
    otdd.LabelMetric("means"),
    otdd.LabelMetric("upper_bound"),
    otdd.LabelMetric("exact"),
    otdd.LabelMetric("sinkhorn", epsilon=1.0),
]
SOURCE, TARGET = blobs(13, classes=2), blobs(17, seed=1, classes=3)
MOVED = replace(SOURCE, features=SOURCE.features + 0.5)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.method}")
def test_remeasured_distances_are_those_of_measuring_everything(metric: otdd.LabelMetric) -> None:
    before = measure_classes(SOURCE, TARGET, metric, device=CPU)
    afresh = measure_classes(MOVED, TARGET, metric, device=CPU)
    after = remeasured(MOVED, TARGET, metric, before)
    assert torch.equal(after.full, afresh.full)
    assert (after.names_x, after.names_y) == (before.names_x, before.names_y)


def test_pairs_within_the_target_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = otdd.LabelMetric()
    before = measure_classes(SOURCE, TARGET, metric, device=CPU)
    counted: list[int] = []

    def counting(clouds: object, pairs: torch.Tensor, metric: object) -> object:
        counted.append(len(pairs))
        return measure_pairs(clouds, pairs, metric)

    monkeypatch.setattr(class_table, "measure_pairs", counting)
    remeasured(MOVED, TARGET, metric, before)
    assert counted == [1 + 2 * 3]


def test_a_class_that_meets_its_double_is_at_no_distance_from_it() -> None:
    metric = otdd.LabelMetric("sinkhorn", epsilon=1.0)
    before = measure_classes(SOURCE, SOURCE, metric, device=CPU)
    table = remeasured(SOURCE, SOURCE, metric, before)
    assert table.xy.diagonal().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["none", "given"])
def test_tables_that_points_do_not_decide_stay(method: str) -> None:
    table = measure_classes(SOURCE, TARGET, otdd.LabelMetric(), device=CPU)
    metric = otdd.LabelMetric(method, given=table if method == "given" else None)
    assert remeasured(MOVED, TARGET, metric, table) is table


@pytest.mark.parametrize("metric", METRICS[:3], ids=["full", "diagonal", "means"])
def test_the_differentiable_table_has_the_values_and_their_gradients(
    metric: otdd.LabelMetric,
) -> None:
    small, target = blobs(8, 2), blobs(8, 2, seed=1)
    whole = measure_classes(small, target, metric, device=CPU)
    moving = small.features.clone().requires_grad_()

    def table(features: torch.Tensor) -> torch.Tensor:
        # Samples are checked on the way in, so autograd has to find the features in them.
        return differentiable_table(replace(small, features=features), target, metric, whole.yy)

    torch.testing.assert_close(table(moving).detach(), whole.full, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(table, moving)
