"""Small datasets, flows between them, and what flows are compared by."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from otdd_flash.flows.flow import MODES
from otdd_flash.flows.modes import Mode
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.labels import LabelMetric, measure_classes
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples

EPSILON = 1.0
CPU = torch.device("cpu")
DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")
TIGHT = otdd.Converged(tolerance=1e-9)

# Every mode, and the forms of covariance that change how it works.
CASES: dict[str, dict[str, Any]] = {
    f"{mode}, {kind}": {"mode": mode, "labels": metric}
    for mode in ("features", "attached", "joint", "augmented")
    for kind, metric in (
        ("full", otdd.labels.Gaussian(unbiased=False)),
        ("diagonal", otdd.labels.Gaussian(unbiased=False, diagonal=True)),
        ("means", otdd.labels.Means()),
    )
}


def blobs(
    n: int, d: int = 3, seed: int = 0, shift: float = 0.0, classes: int = 2
) -> LabeledSamples:
    """n float64 points of normal classes with means and spreads of their own."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, d, generator=draw, dtype=torch.float64)
    mixing = torch.randn(classes, d, d, generator=draw, dtype=torch.float64) / 2
    normal = torch.randn(n, d, generator=draw, dtype=torch.float64)
    points = centres[labels] + (normal.unsqueeze(1) @ mixing[labels]).squeeze(1) + shift
    return LabeledSamples(points, labels, tuple("abcdef"[:classes]))


def digits(split: str, count: int, *, rotate: float = 0.0) -> Any:
    """Bundled digits as float64 vectors (count, 64) of values in [0, 1]."""
    loaded = otdd.load("digits", split=split, max_samples=count, rotate=rotate)
    samples = otdd.embed(loaded, otdd.extractors.pixels())
    return replace(samples, features=samples.features.double())


def flow(source: LabeledSamples, target: LabeledSamples, **options: Any) -> otdd.FlowResult:
    """A flow of 2 steps, solved tightly in float64, unless the options say otherwise.

    They are those of `gradient_flow`, of its `Flow` and of its `Callbacks` side by side.
    """
    usual: dict[str, Any] = {
        "steps": 2,
        "epsilon": EPSILON,
        "solver": TIGHT,
        "compute": DOUBLE,
        "stepping": otdd.Stepping(step_size=0.3),
    }
    left = {**usual, **options}
    moves = otdd.Flow(**taken(otdd.Flow, left))
    callbacks = otdd.Callbacks(**taken(otdd.Callbacks, left))
    return otdd.gradient_flow(source, target, moves, callbacks=callbacks, **left)


def rough_flow(source: LabeledSamples, target: LabeledSamples, **options: Any) -> otdd.FlowResult:
    """A flow of 2 steps in a few iterations, where nothing depends on how well it is solved."""
    return flow(source, target, **{"epsilon": 4.0, "solver": otdd.Converged(1e-2), **options})


def taken(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass, taken out of the others."""
    return {part.name: options.pop(part.name) for part in fields(kind) if part.name in options}


def setting_of(source: LabeledSamples, target: LabeledSamples, metric: LabelMetric) -> FlowSetting:
    """The problem of a flow as `flow` solves it."""
    comparison = Comparison.prepare((source, target), otdd.GroundCost(), DOUBLE).at(EPSILON)
    return FlowSetting(comparison, metric, TIGHT, otdd.Flow(), (), otdd.Callbacks())


def mode_of(name: str, source: LabeledSamples, target: LabeledSamples, metric: LabelMetric) -> Mode:
    """A mode at the start of its flow."""
    table = measure_classes(source, target, metric)
    return MODES[name](setting_of(source, target, metric), table)


def assert_same_flow(
    one: otdd.FlowResult, other: otdd.FlowResult, *, seconds: bool = False
) -> None:
    """To the last bit, but for the time it took unless that is compared, too."""
    for side in ("source", "target", "samples"):
        mine, theirs = getattr(one, side), getattr(other, side)
        assert mine.fingerprint == theirs.fingerprint, side
        assert (mine.name, mine.subset_hash) == (theirs.name, theirs.subset_hash)
    for name in ("settings", "stopped_by", "compute"):
        assert getattr(one, name) == getattr(other, name), name
    for mine, theirs in zip(one.evaluations, other.evaluations, strict=True):
        assert mine == (theirs if seconds else replace(theirs, seconds=mine.seconds))
    assert torch.equal(one.class_distances.full, other.class_distances.full)
    assert one.class_distances.names_x == other.class_distances.names_x
    for key in ("rows", "steps", "points", "labels"):
        mine, theirs = getattr(one.trajectory, key), getattr(other.trajectory, key)
        assert (mine is theirs is None) or torch.equal(mine, theirs), key
    for moment, twin in zip(one.moments, other.moments, strict=True):
        assert moment.step_size == twin.step_size
        assert all(torch.equal(*parts) for parts in zip(moment[1:], twin[1:], strict=True))


def names(folder: Path) -> list[str]:
    """Files of a folder, and in its folders."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def shards(folder: Path, step: int) -> list[Path]:
    """Files of the checkpoint of a step."""
    return sorted((folder / "checkpoint").glob(f"step-{step}.*"))
