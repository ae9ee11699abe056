"""Small tasks of a study: classes of points, turned by some angle."""

from __future__ import annotations

import math
from typing import Any

import torch

import otdd_flash as otdd

QUICK = otdd.Transfer(
    seeds=2, source_epochs=2, target_epochs=1, min_target_steps=5, target_samples=6
)


def small_task(
    seed: int, *, angle: float = 0.0, rows: int = 40, classes: int = 3, d: int = 4
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    """(train, test) of classes on a circle, in the first two of d features."""
    generator = torch.Generator().manual_seed(seed)
    names = tuple(f"c{k}" for k in range(classes))

    def some(count: int) -> otdd.LabeledSamples:
        labels = torch.arange(count) % classes
        turns = 2 * math.pi * labels / classes + angle
        features = 0.8 * torch.randn(count, d, generator=generator)
        features[:, :2] += torch.stack((turns.cos(), turns.sin()), 1)
        return otdd.LabeledSamples(features, labels, names)

    return some(rows), some(200)


def small_tasks(count: int = 4) -> dict[str, Any]:
    """Tasks of some sizes and angles."""
    return {
        f"task {k}": small_task(k, angle=0.3 * k, rows=30 + 5 * k, classes=3 - k % 2)
        for k in range(count)
    }


def small_study(count: int = 4, **more: Any) -> otdd.Study:
    """A study of small tasks, with quick transfer runs and few draws."""
    given = {"transfer": QUICK, "projections": 60, "compute": "cpu"}
    return otdd.Study(small_tasks(count), **{**given, **more})
