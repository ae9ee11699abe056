"""Checks of point clouds that are given as tensors, and the `Comparison` made of them.

The entry points of `derivatives` call `compared_tensors`: `loss`, `potentials` and `hessian`.
`loss` also calls `check_batch` and `class_totals_of` for batches; `loss` and `potentials` ask
`type_of` for the type of a result. Given matrices have the same MASS_TOLERANCE
(`solver.matrix_comparison`).

Errors of points, masses and labels must name the argument. Points, masses and class distances of
the `Comparison` must be detached, because gradients come from the backward passes of the entry
points alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError, prefixed
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples

# Points, masses and labels of a side; None stands for uniform masses, or for one class.
TensorSide = tuple[Tensor, Tensor | None, Tensor | None]

# How far from 1 given masses may sum: float32 rounding of many of them, and nothing worse.
MASS_TOLERANCE = 1e-6


def compared_tensors(
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
) -> Comparison:
    """Check the arguments of `sinkhorn_loss`, raise its errors, and compare both sides.

    The other arguments are those of `Comparison.between`.
    """
    (x, a, labels_x), (y, b, labels_y) = of_x, of_y
    _check_clouds(x, y)
    _check_one_device(x, y)
    totals = class_totals_of(labels_x, labels_y, class_table, class_totals)
    source = _samples(("x", "a"), x, labels_x, totals[0], a)
    target = _samples(("y", "b"), y, labels_y, totals[1], b)
    if compute is None:
        double = torch.float64 in (source.features.dtype, target.features.dtype)
        compute = ComputeOptions(device=str(x.device), precision="double" if double else "fast")
    compute = ComputeOptions.of(compute)
    table = None if class_table is None else class_table.detach()
    return Comparison.between(
        source, target, epsilon, table, weights, compute, debias=debias, resident=resident
    )


def type_of(comparison: Comparison) -> torch.dtype:
    """Return the type of a loss: float64 if a cloud is, else float32."""
    x, y = (side.features.dtype for side in comparison.given)
    # Files may hold float16 or bfloat16; points in memory are float32 or float64.
    return torch.promote_types(torch.promote_types(x, y), torch.float32)


def check_batch(of_x: TensorSide, of_y: TensorSide) -> None:
    """Refuse B pairs (B, n, d) and (B, m, d) whose parts do not fit.

    Raises:
        InputError: another B or d on one side, or masses or labels that are not one a point.
    """
    x, y = of_x[0], of_y[0]
    if len(x) != len(y):
        raise InputError(
            f"x is a batch of {len(x)} clouds and y of {len(y)}; give one of each to a pair"
        )
    for side, (points, masses, labels) in zip("xy", (of_x, of_y), strict=True):
        for name, part in (("a" if side == "x" else "b", masses), (f"labels_{side}", labels)):
            if part is not None and part.shape != points.shape[:2]:
                wanted = tuple(points.shape[:2])
                alike = f"; {name}.expand{wanted} is the same in all pairs"
                raise InputError(
                    f"{name} must have shape {wanted}, one entry for each point of the batch "
                    f"{side}, got {tuple(part.shape)}"
                    + (alike if part.shape == points.shape[1:2] else "")
                )


def _check_clouds(x: Tensor, y: Tensor) -> None:
    """Refuse shapes other than (n, d), with the way out for each."""
    for name, one, other in (("x", x, y), ("y", y, x)):
        shape = tuple(one.shape)
        if one.ndim == 3 and other.ndim == 2:
            raise InputError(
                f"{name} is a batch of clouds, {shape}, and the other side one cloud, "
                f"{tuple(other.shape)}; expand that to a batch, as by "
                f"{'y' if name == 'x' else 'x'}.expand({len(one)}, -1, -1), for sinkhorn_loss, or "
                "give clouds (n, d) one pair at a time"
            )
        if one.ndim == 3:
            raise InputError(
                f"{name} must be a cloud (n, d), got shape {shape}; give pairs of a batch one at a "
                "time, or to otdd.sinkhorn_loss, which takes (B, n, d)"
            )
        if one.ndim > 3:
            raise InputError(
                f"{name} must be a cloud (n, d), or a batch (B, n, d) in sinkhorn_loss, got shape "
                f"{shape}; {name}.flatten(1) makes points of images, {name}.flatten(0, -3) one "
                "batch of nested ones"
            )
        if one.ndim < 2:
            raise InputError(
                f"{name} must be a cloud (n, d), got shape {shape}; {name}.reshape(-1, 1) makes "
                "points of numbers"
            )


def _check_one_device(x: Tensor, y: Tensor) -> None:
    if x.device != y.device:
        raise InputError(
            f"x is on {x.device} and y on {y.device}; move both to one device with .to()"
        )


def _samples(
    called: tuple[str, str],
    points: Tensor,
    labels: Tensor | None,
    classes: int,
    masses: Tensor | None,
) -> LabeledSamples:
    """Check one side; `called` names the arguments of its points and of its masses."""
    names = tuple(map(str, range(classes)))
    weights = None if masses is None else masses.detach()
    if isinstance(points, FileFeatures):
        points.check()
    points = points.detach()
    # Other layouts are refused by `LabeledSamples`.
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


def class_totals_of(
    labels_x: Tensor | None,
    labels_y: Tensor | None,
    table: Tensor | None,
    given: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return (V_x, V_y) as given, or as the labels imply if that fits the table.

    Raises:
        InputError: labels without a table, a table without labels, or they do not fit.
    """
    _check_classes(labels_x, labels_y, table)
    if given is not None:
        return given
    seen_x, seen_y = (
        1 if labels is None or not labels.numel() else int(labels.max()) + 1
        for labels in (labels_x, labels_y)
    )
    # Labels can only imply too few classes, so a number that fits the table is right.
    seen = seen_x + seen_y
    if table is not None and table.shape != (seen, seen):
        larger = table.ndim == 2 and table.shape[0] == table.shape[1] > seen
        raise InputError(
            f"class_table has shape {tuple(table.shape)}, but the labels tell of {seen_x} + "
            f"{seen_y} classes; "
            + (
                "if the last class of a side has no point here, pass class_totals=(V_x, V_y)"
                if larger
                else f"pass distances between all of them, ({seen}, {seen})"
            )
        )
    return seen_x, seen_y


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
