"""Results share the memory of what was compared, and say so once that is changed in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import mark_of

KINDS = np.arange(12) % 3


def points(shift: float = 0.0) -> Any:
    return np.random.default_rng(int(shift)).normal(size=(12, 4)) + shift


def shuffle(x: Any) -> None:
    x[:] = x[::-1].copy()


def one_bit(x: Any) -> None:
    x.view(np.uint64)[-1, -1] ^= np.uint64(1)


@pytest.mark.parametrize(
    ("ask", "change"),
    [
        (lambda result, path: result.save(path), shuffle),
        (lambda result, _: result.class_coupling(), one_bit),
        (lambda result, _: result.contributions(), one_bit),
        (lambda result, _: result.apply_plan(torch.ones(12)), shuffle),
        (lambda result, _: result.mean_cost, one_bit),
    ],
    ids=["saved", "coupling", "contributions", "applied", "mean cost"],
)
# Of one column of a matrix the bytes could not be read, whose strides are those of the matrix.
@pytest.mark.parametrize("columns", [slice(None), slice(1, 2)], ids=["all", "one column"])
def test_nothing_is_said_of_points_that_were_changed(
    ask: Any, change: Any, columns: slice, tmp_path: Path
) -> None:
    """A saved result held a distance and points that were at another one."""
    x = np.asfortranarray(points())[:, columns] if columns.start else points()
    result = otdd.dataset_distance((x, KINDS), (points(1)[:, columns], KINDS), epsilon=1.0)
    ask(result, tmp_path)
    change(x)
    with pytest.raises(InputError, match="source was changed in place after this result was"):
        ask(result, tmp_path)


def test_a_flow_says_nothing_of_points_that_were_changed(tmp_path: Path) -> None:
    y = points(1)
    flow = otdd.gradient_flow((points(), KINDS), (y, KINDS), otdd.Flow(steps=1), epsilon=1.0)
    flow.save(tmp_path)
    y += 1
    for ask in ((lambda: flow.save(tmp_path)), flow.map):
        with pytest.raises(InputError, match="target was changed in place"):
            ask()


@pytest.mark.parametrize("part", ["features", "labels", "weights"])
def test_a_fingerprint_is_of_what_is_there_now(part: str) -> None:
    """One that was kept let a study and a flow that resumes take changed points for the old."""
    parts = {"features": torch.from_numpy(points()), "labels": torch.from_numpy(KINDS.copy())}
    parts["weights"] = torch.full((12,), 1 / 12, dtype=torch.float64)
    samples = otdd.LabeledSamples(**parts, class_names=("a", "b", "c"))
    before, kept = samples.fingerprint, parts[part][0].clone()
    parts[part][0] = 2
    assert samples.fingerprint != before
    parts[part][0] = kept
    assert samples.fingerprint == before


def test_blocks_in_threads_see_every_change() -> None:
    x = torch.zeros(70_000, 70)
    samples, marks = otdd.LabeledSamples(x, None, ()), []
    for ends in (torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])):
        x[[0, -1]] = ends
        assert mark_of(samples) == mark_of(samples)
        marks.append(mark_of(samples))
    assert len(set(marks)) == 3


@pytest.mark.gpu
def test_changes_on_a_gpu_are_counted() -> None:
    x, y = (torch.from_numpy(points(shift)).cuda() for shift in (0, 1))
    result = otdd.dataset_distance((x, KINDS), (y, KINDS))
    result.class_coupling()
    x.add_(1)
    with pytest.raises(InputError, match="source was changed in place"):
        result.class_coupling()
