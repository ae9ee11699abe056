"""Families of clouds in which few points are met many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import otdd_flash as otdd
from experiments.exact_families.building import (
    Frame,
    Points,
    Random,
    Weights,
    any_weights,
    collapsed_side,
    draw_weights,
    spread_index,
    symmetric_table,
)
from experiments.exact_families.problem import Integers, Problem, Side

DEFAULT = otdd.GroundCost()


def two_clusters(frame: Frame, separation: float | None = None) -> Problem:
    """Half of the points at 0 and half at s, on both sides.

    OT = epsilon (log 2 - log1p(exp(-s^2 / (2 epsilon)))) at the default weights of the cost.
    """
    random = frame.random
    s = random.uniform(0.5, 2) * 10 ** random.choice([0.0, 0.0, -3.0, 3.0])
    atoms = np.zeros((2, frame.dimension(1, 1, 2, 17, 64)), dtype=np.float32)
    atoms[1, 0] = s if separation is None else separation
    index = [
        spread_index(random, max(2, size - size % 2), 2, even=True) for size in (frame.n, frame.m)
    ]
    sides = [collapsed_side(atoms, one, None, device=frame.device) for one in index]
    return Problem("two_clusters", sides[0], sides[1], None, DEFAULT)


def clusters(frame: Frame) -> Problem:
    """A few clusters a side of unequal sizes, at times with weights, and with classes."""
    scale = 10 ** frame.random.uniform(-2, 2)
    return _normal_atoms("clusters", frame, scale=scale, offset=0.0, dimensions=(1, 2, 5, 64, 300))


def far_from_origin(frame: Frame) -> Problem:
    """Clusters around a common point that is hundreds of spreads from 0."""
    offset = float(frame.random.choice([500.0, 500.0, 1e4]))
    return _normal_atoms("far_from_origin", frame, scale=1.0, offset=offset, dimensions=(1, 3, 64))


def orders_of_magnitude(frame: Frame) -> Problem:
    """Masses over many orders of magnitude."""
    return _normal_atoms(
        "orders_of_magnitude", frame, scale=1.0, offset=0.0, dimensions=(1, 3, 30), weights="orders"
    )


def one_hot(frame: Frame) -> Problem:
    """Categories as unit vectors."""
    random = frame.random
    d = frame.dimension(2, 3, 10, 33)
    atoms = np.eye(d, dtype=np.float32)
    found = []
    for size in (frame.n, frame.m):
        seen = random.choice(d, size=int(random.integers(1, min(d, size, 16) + 1)), replace=False)
        found.append(atoms[seen])
    return _collapsed("one_hot", frame, (found[0], found[1]))


def grey_values(frame: Frame) -> Problem:
    """Whole numbers from 0 to 255 as pixels hold them, few distinct images."""
    random = frame.random
    d = frame.dimension(1, 4, 16, 64, 784)
    first, second = (
        random.integers(0, 256, (count, d)).astype(np.float32) for count in frame.atoms(6)
    )
    return _collapsed("grey_values", frame, (first, second))


def all_equal(frame: Frame) -> Problem:
    """Every point of a side is one point; at times both sides are, and every cost is 0."""
    random = frame.random
    d = frame.dimension(1, 3, 64)
    first = random.normal(size=(1, d)).astype(np.float32)
    same = random.random() < 0.6
    second = first if same else random.normal(size=(1, d)).astype(np.float32)
    return _collapsed("all_equal", frame, (first, second), with_classes=False)


def one_outlier(frame: Frame) -> Problem:
    """Clusters, and one point of little mass far away from them."""
    random = frame.random
    d = frame.dimension(1, 3, 30)
    sides: list[Side] = []
    for size, count in zip((frame.n, frame.m), frame.atoms(4), strict=True):
        atoms = random.normal(size=(count, d)).astype(np.float32)
        index = spread_index(random, size, count)
        weights = np.ones(size)
        if not sides or random.random() < 0.3:
            far = random.normal(size=(1, d)).astype(np.float32) * 10 ** random.uniform(0.5, 4)
            atoms = np.concatenate((atoms, far.astype(np.float32)))
            index = np.append(index, count)
            weights = np.append(weights, size * 10 ** random.uniform(-12, -2))
        sides.append(collapsed_side(atoms, index, weights, device=frame.device))
    return Problem("one_outlier", sides[0], sides[1], None, DEFAULT)


def nearly_constant(frame: Frame) -> Problem:
    """Long vectors whose coordinates are all about one irrational number.

    After centring every product of two coordinates is about the same and rounds the same way.
    """
    random = frame.random
    dims = [d for d in (1_000, 10_000, 100_000) if 4 * d <= frame.most_elements]
    d = int(random.choice(dims))
    most = frame.most_elements // d
    n, m = min(frame.n, max(2, most // 2)), min(frame.m, max(2, most // 2))
    small = Frame(random, n, m, frame.device, frame.most_elements)
    jitter = random.choice([0.0, 1e-6, 1e-4, 1e-2])
    offset = random.choice([0.0, 1.0, 100.0])
    both = []
    for count in small.atoms(3):
        level = offset + random.uniform(-1, 1, (count, 1))
        both.append((level * (1 + jitter * random.normal(size=(count, d)))).astype(np.float32))
    return _collapsed("nearly_constant", small, (both[0], both[1]), with_classes=False)


def labels_alone(frame: Frame) -> Problem:
    """lambda_x = 0: the cost reads the classes, while features differ from point to point."""
    random = frame.random
    d = frame.dimension(1, 3, 64)
    totals = frame.atoms(8)
    table = symmetric_table(random, sum(totals), 10 ** random.uniform(-2, 3))
    spread = float(random.choice([1.0, 1e3]))
    sides = []
    for size, classes in zip((frame.n, frame.m), totals, strict=True):
        index = spread_index(random, size, classes)
        noise = torch.Generator(frame.device).manual_seed(int(random.integers(2**31)))
        features = spread * torch.randn(size, d, generator=noise, device=frame.device)
        weights = draw_weights(random, index, any_weights(random))
        side = collapsed_side(
            np.zeros((classes, d), dtype=np.float32),
            index,
            weights,
            classes=np.arange(classes),
            class_total=classes,
            device=frame.device,
            features=features,
        )
        sides.append(side)
    return Problem("labels_alone", sides[0], sides[1], table, otdd.GroundCost(0.0, 1.0))


def signed_table(frame: Frame) -> Problem:
    """Class costs with large negative entries, or large ones that nearly agree."""
    random = frame.random
    d = frame.dimension(1, 3, 64)
    totals = frame.atoms(5)
    size = 10 ** random.uniform(-1, 5)
    table = symmetric_table(random, sum(totals), size)
    match int(random.integers(3)):
        case 0:
            table = -table
        case 1:
            table = table - size / 2
        case 2:
            table = symmetric_table(random, sum(totals), 1.0) + size * random.choice([-1.0, 1.0])
    table = (table + table.T) / 2
    atoms = tuple(random.normal(size=(count, d)).astype(np.float32) for count in totals)
    weights = otdd.GroundCost(0.5, float(random.choice([0.5, 1.0, 0.3])))
    sides = []
    for size_, points in zip((frame.n, frame.m), atoms, strict=True):
        index = spread_index(random, size_, len(points))
        classes = np.arange(len(points))
        sides.append(
            collapsed_side(
                points,
                index,
                draw_weights(random, index, any_weights(random)),
                classes=classes,
                class_total=len(points),
                device=frame.device,
            )
        )
    return Problem("signed_table", sides[0], sides[1], table, weights)


def _normal_atoms(
    family: str,
    frame: Frame,
    *,
    scale: float,
    offset: float,
    dimensions: tuple[int, ...],
    weights: Weights | None = None,
) -> Problem:
    """Atoms drawn from a normal distribution, in float32 or at times in float64."""
    random = frame.random
    d = frame.dimension(*dimensions)
    dtype: type[np.floating[Any]] = np.float64 if random.random() < 0.15 else np.float32
    first, second = (
        (offset + scale * random.normal(size=(count, d))).astype(dtype) for count in frame.atoms(6)
    )
    return _collapsed(family, frame, (first, second), weights=weights)


def _collapsed(
    family: str,
    frame: Frame,
    atoms: tuple[Points, Points],
    *,
    weights: Weights | None = None,
    with_classes: bool = True,
) -> Problem:
    """Two clouds of copies of atoms; every other time with classes and a table."""
    random = frame.random
    labelled = with_classes and random.random() < 0.5
    totals = tuple(int(total) for total in random.integers(1, 5, 2)) if labelled else (1, 1)
    span = float(np.square(np.ptp(np.concatenate(atoms), axis=0).astype(np.float64)).sum()) or 1.0
    table = symmetric_table(random, sum(totals), span * 10 ** random.uniform(-2, 1))
    sides = []
    for size, points, total in zip((frame.n, frame.m), atoms, totals, strict=True):
        count = min(size, len(points))
        index = spread_index(random, size, count)
        side = collapsed_side(
            points[:count],
            index,
            draw_weights(random, index, weights or any_weights(random)),
            classes=_classes(random, count, total) if labelled else None,
            class_total=total,
            device=frame.device,
        )
        sides.append(side)
    cost = _weights(random) if labelled else DEFAULT
    return Problem(family, sides[0], sides[1], table if labelled else None, cost)


def _classes(random: Random, atoms: int, total: int) -> Integers:
    """The class of every atom; mostly no class is without atoms, if they suffice."""
    classes = random.integers(0, total, atoms)
    if random.random() < 0.8:
        classes[: min(atoms, total)] = np.arange(min(atoms, total))
    return classes


def _weights(random: Random) -> otdd.GroundCost:
    if random.random() < 0.7:
        return DEFAULT
    return otdd.GroundCost(float(random.choice([0.1, 1.0])), float(random.choice([0.3, 1.0])))
