"""Clouds as tensors: checked, with the problem between them."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.errors import InputError, prefixed
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.build import Compute, ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem

# Points, masses and labels of a side; uniform masses and one class for None.
TensorSide = tuple[Tensor, Tensor | None, Tensor | None]

# How far from 1 given masses may sum: float32 rounding of many of them, and nothing worse.
MASS_TOLERANCE = 1e-6


def problem_of_tensors(
    of_x: TensorSide,
    of_y: TensorSide,
    epsilon: float,
    class_table: Tensor | None,
    class_totals: tuple[int, int] | None,
    weights: GroundCost,
    compute: Compute | None,
    *,
    debias: bool,
    resident: bool = True,
) -> Problem:
    """What `sinkhorn_loss` solves; arguments and errors as there, `resident` as of requests."""
    (x, a, labels_x), (y, b, labels_y) = of_x, of_y
    _check_one_device(x, y)
    _check_classes(labels_x, labels_y, class_table)
    totals = _class_totals(labels_x, labels_y, class_table, class_totals)
    source = _samples(("x", "a"), x, labels_x, totals[0], a)
    target = _samples(("y", "b"), y, labels_y, totals[1], b)
    if compute is None:
        double = torch.float64 in (source.features.dtype, target.features.dtype)
        compute = ComputeOptions(device=str(x.device), precision="double" if double else "fast")
    compute = ComputeOptions.of(compute)
    table = None if class_table is None else class_table.detach()
    return Problem.between(
        source, target, epsilon, table, weights, compute, debias=debias, resident=resident
    )


def type_of(problem: Problem) -> torch.dtype:
    """Float64 if a cloud is, and else float32: of the number that a loss returns."""
    x, y = (side.features.dtype for side in problem.request.given)
    # Files may hold half types, which points in memory have left.
    return torch.promote_types(torch.promote_types(x, y), torch.float32)


def _check_one_device(x: Tensor, y: Tensor) -> None:
    if x.device != y.device:
        raise InputError(
            f"x is on {x.device} and y on {y.device}; move both to one device with .to()"
        )


def _check_classes(labels_x: Tensor | None, labels_y: Tensor | None, table: Tensor | None) -> None:
    """Refuse labels without distances between them, and distances without labels to look up."""
    labelled = labels_x is not None or labels_y is not None
    if labelled and table is None:
        raise InputError(
            "labels need class_table, the squared distances between their classes, such as "
            "otdd.class_distances([x, y]).between(0, 1).full; without them leave the labels out"
        )
    if table is not None and not labelled:
        raise InputError(
            "class_table needs labels_x and labels_y, which tell the class of every point; without "
            "classes leave the table out"
        )


def _samples(
    called: tuple[str, str],
    points: Tensor,
    labels: Tensor | None,
    classes: int,
    masses: Tensor | None,
) -> LabeledSamples:
    """One side; `called` names the arguments of its points and of its masses."""
    names = tuple(map(str, range(classes)))
    weights = None if masses is None else masses.detach()
    if isinstance(points, FileFeatures):
        points.check()
    points = points.detach()
    # Others are refused.
    points = points.contiguous() if points.layout == torch.strided else points
    try:
        samples = LabeledSamples(points, labels, names, weights, name=called[0])
    except InputError as error:
        raise prefixed(called[0], error) from error
    if weights is not None:
        total = float(weights.double().sum())
        if abs(total - 1) > MASS_TOLERANCE:
            raise InputError(f"{called[1]} must sum to 1, got {total:.8g}; divide it by its sum")
    return samples


def _class_totals(
    labels_x: Tensor | None,
    labels_y: Tensor | None,
    table: Tensor | None,
    given: tuple[int, int] | None,
) -> tuple[int, int]:
    """(V_x, V_y): as given, or as the labels tell if that fits the table."""
    if given is not None:
        return given
    seen_x, seen_y = (
        1 if labels is None or not len(labels) else int(labels.max()) + 1
        for labels in (labels_x, labels_y)
    )
    # Labels can only tell too few classes, so what fits the table is right.
    if table is not None and table.shape != (seen_x + seen_y, seen_x + seen_y):
        raise InputError(
            f"class_table has shape {tuple(table.shape)}, but the labels tell of {seen_x} + "
            f"{seen_y} classes; if the last class of a side has no point here, pass "
            "class_totals=(V_x, V_y)"
        )
    return seen_x, seen_y
