"""The metric is the dataset distance of the rows it has seen, in one process or several.

All are slow: torchmetrics takes two seconds to import.
"""

from __future__ import annotations

import pickle
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rank_pool import pool
from refusals import naming

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError

if TYPE_CHECKING:
    from otdd_flash.integrations.torchmetrics import DatasetDistance as Metric

pytestmark = pytest.mark.slow


def _rows(count: int, shift: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return torch.randn(count, 4, generator=generator) + shift + labels[:, None], labels


SOURCE, TARGET = _rows(60, 0.0, 0), _rows(45, 0.7, 1)


def DatasetDistance(**settings: Any) -> Metric:
    # Imported here: it is not needed to list these tests.
    pytest.importorskip("torchmetrics", reason="comes with the extra integrations")
    from otdd_flash.integrations.torchmetrics import DatasetDistance as Metric

    return Metric(**settings)


@cache
def _expected() -> otdd.DistanceResult:
    return otdd.dataset_distance(SOURCE, TARGET, epsilon=0.5, compute="cpu")


def _fed(metric: Metric) -> Metric:
    """In batches of one buffer, which the next is written over, as loops do; labels of half types.

    Copied to a process and back, as one does that is fed in inference mode.
    """
    for start in range(0, 60, 20):
        rows, few = slice(start, start + 20), slice(start * 3 // 4, (start + 20) * 3 // 4)
        batch = [SOURCE[0][rows], TARGET[0][few], SOURCE[1][rows], TARGET[1][few]]
        batch = [part.clone() for part in batch[:2]] + [batch[2].bfloat16(), batch[3].half()]
        with torch.inference_mode():
            metric.update(*batch)
        for part in batch:
            part.zero_()
    return pickle.loads(pickle.dumps(metric))


def test_it_is_the_distance_of_all_rows_with_its_bounds_and_reset_forgets_them() -> None:
    metric, expected = _fed(DatasetDistance(epsilon=0.5)), _expected()
    found = metric.compute()
    assert found["value"].item() == expected.value
    assert (found["lower"].item(), found["upper"].item()) == expected.bounds
    assert found["value"].dtype == torch.float64
    metric.reset()
    with (
        pytest.warns(UserWarning, match="before the ``update``"),
        pytest.raises(InputError, match="no rows of the source yet"),
    ):
        metric.compute()
    # A forward is of the batch.
    of_batch = metric(SOURCE[0], TARGET[0], SOURCE[1], TARGET[1])
    assert of_batch["value"].item() == expected.value


def test_the_first_compute_fixes_the_epsilon_for_all_later_ones() -> None:
    metric = DatasetDistance(labels="none")
    metric.update(SOURCE[0][:20], TARGET[0][:15])
    first = otdd.dataset_distance(SOURCE[0][:20], TARGET[0][:15], labels="none")
    assert metric.compute()["value"].item() == first.value
    metric.reset()
    metric.update(SOURCE[0] * 10, TARGET[0])
    later = otdd.dataset_distance(SOURCE[0] * 10, TARGET[0], labels="none", epsilon=first.epsilon)
    assert metric.compute()["value"].item() == later.value
    # Merged, as of processes whose batches differ: the least that one of them has fixed.
    one, other = (DatasetDistance(labels="none", epsilon_relative=0.5) for _ in range(2))
    one(SOURCE[0] * 10, TARGET[0])
    other(SOURCE[0][:20], TARGET[0][:15])
    assert (least := pickle.loads(pickle.dumps(other)).epsilon) < one.epsilon
    one.merge_state(other)
    one.compute()
    assert one.epsilon == least


def test_rows_beyond_the_limit_are_left_out_and_said() -> None:
    metric = DatasetDistance(epsilon=5.0, max_rows=50)
    with pytest.warns(DataNotice, match=r"max_rows=50 of the source are kept; 10 more"):
        metric = _fed(metric)
    kept = (SOURCE[0][:50], SOURCE[1][:50])
    assert (
        metric.compute()["value"].item() == otdd.dataset_distance(kept, TARGET, epsilon=5.0).value
    )


ZEROS = torch.zeros(3, 4)
REFUSED = [
    ({}, (torch.zeros(3), ZEROS), r"source must be \(rows, features\), got \(3,\)"),
    ({}, (ZEROS, ZEROS, torch.zeros(2)), r"source_labels must be \(3,\)"),
    ({}, (ZEROS.to_sparse(), ZEROS), r"must be dense, .* \.to_dense\(\)"),
    ({}, (ZEROS, ZEROS.to("meta")), "target is on the device meta"),
    ({}, (ZEROS, ZEROS + 1j), "target must be real"),
    ({}, (ZEROS.numpy(), ZEROS), r"a tensor, got ndarray of shape \(3, 4\)"),
    ({"labels": "none"}, (ZEROS, ZEROS[:, :3]), "of 4 features and target of 3; both"),
    ({"max_rows": 0}, (ZEROS, ZEROS), "max_rows must be at least 1, got 0"),
    ({"epsilon": 1.0, "epsilon_relative": 0.1}, (ZEROS, ZEROS), "got both"),
    ({"options": {"unbalanced_relative": 0.1}}, (ZEROS, ZEROS), "give unbalanced, in units of the"),
]


def test_rows_and_settings_that_do_not_fit_are_refused() -> None:
    for settings, rows, message in REFUSED:
        with naming(message), pytest.raises(InputError, match=message):
            DatasetDistance(**settings).update(*rows)


def _metric(features: int = 4, labels: torch.Tensor | None = None) -> Metric:
    """Fed once."""
    metric = DatasetDistance(epsilon=0.5, labels="none")
    rows = torch.arange(6.0 * features).reshape(6, features)
    metric.update(rows, rows + 1, labels, labels)
    return metric


def test_rows_unlike_those_before_are_refused_when_they_come_or_are_merged() -> None:
    metric, two = _metric(), torch.zeros(2, 4)
    before = metric.compute()["value"]
    for given, said in (
        ((torch.zeros(2, 5), torch.zeros(2, 5)), "source has rows of 5 features, .* before have 4"),
        ((two, two[:, :3]), "target has rows of 3 features, .* before have 4"),
        ((torch.zeros(0, 5), two), "source has rows of 5 feat"),
        ((two.to("meta"), two), "source is on meta, .* on cpu"),
        ((two[:1], two[:1], torch.zeros(1)), "every update, or with none"),
    ):
        with naming(said), pytest.raises(InputError, match=said):
            metric.update(*given)
    # Nothing is left of them.
    assert metric.compute()["value"] == before
    for other, said in (
        (_metric(3), "source have 3 and 4 features"),
        (_metric(4, torch.zeros(6).long()), "6 of 12 rows of the source have labels"),
    ):
        metric = _metric()
        metric.merge_state(other)
        with naming(said), pytest.raises(InputError, match=said):
            metric.compute()


def _of_two() -> dict[str, float]:
    """One of two processes: it sees every other row."""
    rank, metric = torch.distributed.get_rank(), DatasetDistance(epsilon=0.5)
    metric.update(SOURCE[0][rank::2], TARGET[0][rank::2], SOURCE[1][rank::2], TARGET[1][rank::2])
    return {name: number.item() for name, number in metric.compute().items()}


def test_two_processes_agree_with_one_within_its_bounds() -> None:
    one, other = pool(2).run(_of_two)
    assert one == other
    lower, upper = _expected().bounds
    # Two intervals of the same number.
    assert one["lower"] <= upper
    assert lower <= one["upper"]
    assert lower <= one["value"] <= upper
