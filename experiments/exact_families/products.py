"""Families of product measures: every point is met once, and the truth is a sum over axes."""

from __future__ import annotations

import numpy as np
import torch

import otdd_flash as otdd
from experiments.exact_families.building import Frame, Random, symmetric_table
from experiments.exact_families.problem import Factor, Floats, Problem, Side
from experiments.exact_families.transport import Extended, extended

# An axis of the truth is a dense problem in extended precision.
LONGEST_AXIS = 40


def gaussian_grid(frame: Frame) -> Problem:
    """Points on grids with Gaussian weights, on the two sides of other means and widths."""
    return _product("gaussian_grid", frame, regular=True)


def irregular_product(frame: Frame) -> Problem:
    """Products of irregular axes, at times with classes that are independent of the position."""
    return _product("irregular_product", frame, regular=False)


def _product(family: str, frame: Frame, *, regular: bool) -> Problem:
    random = frame.random
    least = int(np.ceil(np.log(max(frame.n, frame.m)) / np.log(LONGEST_AXIS)))
    axes = max(least, int(random.integers(1, 4)))
    labelled = not regular and random.random() < 0.5
    scale = 10 ** random.uniform(-1, 1)
    totals = (int(random.integers(1, 4)), int(random.integers(1, 4))) if labelled else (1, 1)
    sides = []
    for size, total in zip((frame.n, frame.m), totals, strict=True):
        lengths = _lengths(max(1, size // total), axes)
        coordinates = [_axis(random, length, scale, regular) for length in lengths]
        # Gaussian weights, or equal ones; integers either way.
        weights = [_weights(random, one) for one in coordinates] if regular else None
        sides.append(_side(coordinates, weights, total if labelled else None, frame))
    table = symmetric_table(random, sum(totals), scale**2) if labelled else None
    return Problem(family, sides[0], sides[1], table, otdd.GroundCost())


def _lengths(size: int, axes: int) -> list[int]:
    """Lengths whose product is at most `size` and near it."""
    lengths = []
    for left in range(axes, 0, -1):
        lengths.append(max(1, min(LONGEST_AXIS, int(size ** (1 / left) + 1e-9))))
        size //= lengths[-1]
    return lengths


def _axis(random: Random, length: int, scale: float, regular: bool) -> Floats:
    """Coordinates that float32 holds."""
    if regular:
        found = scale * (random.uniform(-0.5, 0.5) + 3 * np.linspace(-1, 1, length))
    else:
        found = scale * random.normal(size=length)
    return found.astype(np.float32).astype(np.float64)


def _weights(random: Random, axis: Floats) -> Floats:
    """Gaussian weights as multiples of 2^-10 that add up to 1: their products round nothing."""
    centre, width = axis.mean(), np.ptp(axis) * random.uniform(0.15, 0.4) + 1e-30
    shape = np.exp(-(((axis - centre) / width) ** 2) / 2)
    parts = 1 + np.floor((1024 - len(axis)) * shape / shape.sum())
    parts[len(axis) // 2] += 1024 - parts.sum()
    found: Floats = parts / 1024
    return found


def _side(
    coordinates: list[Floats], weights: list[Floats] | None, classes: int | None, frame: Frame
) -> Side:
    lengths = [len(axis) for axis in coordinates] + ([classes] if classes else [])
    grid = np.unravel_index(frame.random.permutation(int(np.prod(lengths))), lengths)
    columns = [
        torch.from_numpy(axis.astype(np.float32)).to(frame.device)[
            torch.from_numpy(index).to(frame.device)
        ]
        for axis, index in zip(coordinates, grid, strict=False)
    ]
    labels = torch.from_numpy(grid[-1]).to(frame.device) if classes else None
    masses = None
    if weights is not None:
        parts = [one[index] for one, index in zip(weights, grid, strict=False)]
        masses = torch.from_numpy(np.prod(parts, axis=0))
    names = tuple(f"class {k}" for k in range(classes or 0))
    samples = otdd.LabeledSamples(torch.stack(columns, 1), labels, names, masses)
    factors = [
        Factor(axis[:, None], None, index, _masses(None if weights is None else weights[k], axis))
        for k, (axis, index) in enumerate(zip(coordinates, grid, strict=False))
    ]
    if classes:
        each = extended(np.ones(classes)) / classes
        factors.append(Factor(np.zeros((classes, 0)), np.arange(classes), grid[-1], each))
    count = len(samples)
    deviation = 0.0 if weights is not None else abs(float(count * np.longdouble(1 / count) - 1))
    return Side(samples, tuple(factors), deviation + 1e-18)


def _masses(weights: Floats | None, axis: Floats) -> Extended:
    return extended(np.ones(len(axis))) / len(axis) if weights is None else extended(weights)
