"""Segments between random classes, and what their kernels compute with, dense and in float64."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.engine.segments import Evaluation, WeightedPoints
from otdd_flash.kernels.segments.step import DIGITS, RANGE_COLUMNS
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments, is_small

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.3
MEMORY = KernelSegments.memory
# Sizes of classes, dimension, and pairs of them. The second has a class of several ranges, the
# third only small tiles; in the others small classes meet large ones.
CASES = [
    pytest.param([1, 33, 130], 3, [(2, 0), (2, 1), (1, 0)], id="mixed"),
    pytest.param([RANGE_COLUMNS + 5, 2], 9, [(0, 1)], id="ranges"),
    pytest.param([64, 7, 1], 70, [(0, 1), (0, 2), (1, 2)], id="small"),
    pytest.param([300, 65], 40, [(0, 1)], id="blocks"),
]
LARGE = [
    pytest.param([5000, 4001, 70], 784, [(0, 1), (1, 2), (0, 2)], marks=pytest.mark.gpu),
    pytest.param([64] * 40 + [50, 1], 512, [(i, 41) for i in range(41)], marks=pytest.mark.gpu),
    pytest.param([3000, 2500], 64, [(0, 1)], marks=pytest.mark.gpu),
    pytest.param([700, 129], 4096, [(0, 1)], marks=pytest.mark.gpu),
]


def classes(sizes, dim):
    draw = torch.Generator().manual_seed(sum(sizes) + dim)
    clouds = []
    for k, size in enumerate(sizes):
        points = torch.randn(size, dim, generator=draw) / dim**0.5 * (1 + k) + 5 * k
        masses = torch.rand(size, generator=draw).double() + 0.1
        clouds.append(WeightedPoints(points.to(DEVICE), (masses / masses.sum()).to(DEVICE)))
    return clouds


class Case:
    """The segments of a case, and what they compute with, dense and in float64.

    With `zeros` every third mass is taken for 0 by what reads potentials.
    """

    def __init__(self, sizes, dim, pairs, *, coarse=False, themselves=False, zeros=False):
        self.clouds, self.sizes, self.pairs = classes(sizes, dim), sizes, pairs
        self.pool = ClassPool(self.clouds)
        index = torch.tensor(pairs, device=DEVICE)
        small = bool(is_small(self.pool.sizes[index]).all())
        rows = index[:, 0].contiguous()
        columns = rows if themselves else index[:, 1].contiguous()
        self.segments = KernelSegments(self.pool, rows, columns, small=small)
        # Those of the coarse form are the same.
        self.vectors = self.segments._vectors
        if coarse:
            self.segments = self.segments.coarse(1e-3)
        if zeros:
            self.pool.pool.masses[::3] = 0
        self.digits = slice(0, 1) if coarse else slice(1, DIGITS)
        draw = torch.Generator().manual_seed(7)
        potential = self.vectors.columns.candidate
        noise = torch.randn(len(potential), generator=draw).to(DEVICE)
        potential.copy_(potential * 0.3 + noise)

    def points(self, k):
        """The class as the kernels see it."""
        digits = self.pool.pool.coordinates.double().unflatten(0, (DIGITS, -1))[self.digits]
        rows = slice(int(self.pool.starts[k]), int(self.pool.starts[k]) + self.sizes[k])
        return digits[:, rows].sum(0) * self.pool.units[k]

    def potentials(self, side):
        counts = [self.sizes[pair[side]] for pair in self.pairs]
        potential = self.vectors.columns.candidate if side else self.vectors.rows
        return [part.double() for part in torch.split(potential, counts)]

    def softmin(self, segment, side, other):
        """-epsilon log sum_j b_j exp((g_j + 2 x_i . y_j) / epsilon)."""
        pair = self.pairs[segment]
        own, opposite = pair[side], pair[1 - side]
        scores = 2 * self.points(own) @ self.points(opposite).T + other
        logs = self.clouds[opposite].masses.log()
        return -EPSILON * torch.logsumexp(logs + scores / EPSILON, 1)

    def evaluate(self, active=None):
        count = len(self.pairs)
        epsilon = torch.full((count,), EPSILON, dtype=torch.float64, device=DEVICE)
        active = torch.ones(count, dtype=torch.bool, device=DEVICE) if active is None else active
        return Evaluation.of(*self.segments.numbers(epsilon, active))

    def fill_vectors(self):
        """Numbers for what was kept and remembered before, of the size of differences."""
        draw = torch.Generator().manual_seed(11)
        vectors = self.vectors.columns
        for k, vector in enumerate(vectors[1:]):
            noise = torch.randn(len(vector), generator=draw).to(DEVICE) * EPSILON
            vector.copy_(noise + vectors.candidate if k == 1 else noise)

    def copy_vectors(self, other, segment):
        """Take those of one segment of another case as those of the only one of this."""
        for name, vector in self.vectors.columns._asdict().items():
            vector.copy_(other.columns(name)[segment].flatten())

    def columns(self, name):
        """A vector of the columns of every segment, (m,) or (2 MEMORY, m) float64."""
        rows = 2 * MEMORY if name == "remembered" else 1
        counts = [rows * self.sizes[pair[1]] for pair in self.pairs]
        parts = torch.split(getattr(self.vectors.columns, name).double(), counts)
        return [part.view(rows, -1) if rows > 1 else part for part in parts]

    def masses(self, segment, side):
        k = self.pairs[segment][side]
        return self.pool.pool.masses[int(self.pool.starts[k]) :][: self.sizes[k]]


def close(case, segment, actual, expected):
    """Within the rounding of the products, and float32's of exponents of this size."""
    size = float(expected.abs().max()) + EPSILON
    atol = float(case.segments.errors.largest[segment]) + 3e-6 * size
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
