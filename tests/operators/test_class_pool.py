"""The points of many classes as kernels read them: what a host asks for, and in what groups."""

from __future__ import annotations

import math

import pytest
import torch

from otdd_flash.engine.problems import WeightedPoints
from otdd_flash.kernels.segments.step import DIGITS
from otdd_flash.operators import kernel_segments
from otdd_flash.operators.kernel_segments import ClassPool

SIZES = (1, 2, 3, 63, 64, 65, 300)


def cloud_of(size: int, dim: int, far: float = 5.0, *, zeros: bool = False) -> WeightedPoints:
    """A class that its size and dimension decide; with `zeros` of both signs in one coordinate."""
    draw = torch.Generator().manual_seed(1000 * dim + size)
    points = torch.randn(size, dim, generator=draw, dtype=torch.float64) + far
    if zeros:
        points[:, -1] = -0.0
    masses = torch.rand(size, generator=draw).double() + 0.1
    return WeightedPoints(points, masses / masses.sum())


def bits_of(pool: ClassPool, k: int) -> list[list[int]]:
    """Every number of one class, as the whole numbers that have its bits."""
    start = int(pool.starts[k])
    rows = slice(start, start + int(pool.sizes[k]))
    digits = pool.pool.coordinates.unflatten(0, (DIGITS, -1))[:, rows]
    points = pool.squares[rows], pool.pool.masses[rows], pool.pool.log2_masses[rows]
    facts = pool.variances[k], pool.units[k], pool.drifts[k], pool.norms[k]
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [
        values.contiguous().view(whole[values.element_size()]).flatten().tolist()
        for values in (digits, *points, *facts)
    ]


@pytest.mark.parametrize(
    ("dim", "zeros", "together"), [(1, False, 1 << 21), (3, True, 200), (64, False, 1)]
)
def test_a_class_is_the_same_to_the_last_bit_wherever_it_is(
    dim: int, zeros: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, first, last, and between classes of other sizes, in either order and any groups."""
    monkeypatch.setattr(kernel_segments, "TOGETHER", together)
    many = [cloud_of(size, dim, zeros=zeros) for size in SIZES]
    last = len(many) - 1
    rising, falling = ClassPool(many), ClassPool(many[::-1])
    assert torch.equal(rising.mean_distances, falling.mean_distances.flip(0, 1))
    for k, cloud in enumerate(many):
        alone = bits_of(ClassPool([cloud]), 0)
        assert bits_of(rising, k) == alone
        assert bits_of(falling, last - k) == alone
        others = many[:k] + many[k + 1 :]
        first, behind = ClassPool([cloud, *others]), ClassPool([*others, cloud])
        assert bits_of(first, 0) == alone
        assert bits_of(behind, last) == alone
        twice = ClassPool([cloud, others[0], cloud])
        assert bits_of(twice, 0) == bits_of(twice, 2) == alone
        # The means, of which nothing else is kept.
        assert twice.mean_distances[0, 1] == first.mean_distances[0, 1]
        assert twice.mean_distances[0, 2] == 0


@pytest.mark.parametrize(
    ("size", "dim", "far"), [(1, 3, 5.0), (3, 100, 0.0), (65, 1, 1e6), (300, 64, 5.0)]
)
def test_facts_are_those_of_exact_sums(size: int, dim: int, far: float) -> None:
    """Of the class's own mean, which may be rounded itself: relative to the points, not to x'."""
    cloud, other = cloud_of(size, dim, far), cloud_of(2, dim, -3.0)
    pool = ClassPool([cloud, other])
    means = [
        [math.fsum((each.masses * column).tolist()) for column in each.points.T]
        for each in (cloud, other)
    ]
    points = cloud.points - torch.tensor(means[0], dtype=torch.float64)
    squares = torch.tensor(
        [math.fsum(row) for row in points.square().tolist()], dtype=torch.float64
    )
    lost = 2.0**-50 * (far + 5) * dim**0.5
    reach = math.sqrt(squares.max())
    close = {"rtol": 1e-14, "atol": 4 * lost * reach + lost**2}
    torch.testing.assert_close(pool.squares[:size].double(), squares, rtol=1e-7, atol=close["atol"])
    variance = torch.tensor(math.fsum((cloud.masses * squares).tolist()), dtype=torch.float64)
    torch.testing.assert_close(pool.variances[0], variance, **close)
    torch.testing.assert_close(pool.norms[0, 0].square(), squares.max(), **close)
    assert float(pool.drifts[0]) <= lost
    apart = math.fsum((one - two) ** 2 for one, two in zip(*means, strict=True))
    assert float(pool.mean_distances[0, 1]) == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize("far", [0.0, 1e4, 1e8])
def test_differences_of_points_are_kept_far_from_the_origin(far: float) -> None:
    """Whatever the mean is rounded to, x' are x less one and the same number, but for 2^-50 A."""
    cloud = cloud_of(65, 9, far)
    pool = ClassPool([cloud])
    digits = pool.pool.coordinates.double().unflatten(0, (DIGITS, -1))[1:, :65, :9]
    points = digits.sum(0) * pool.units
    reach, lost = float(pool.norms[0, 0]), float(pool.norms[0, 3])
    for k in range(1, 65):
        # Of neighbours in float64 the difference is exact.
        error = (points[k] - points[0]) - (cloud.points[k] - cloud.points[0])
        assert float(error.norm()) <= 2 * (lost + 2.0**-50 * reach)


def test_classes_that_are_padded_to_one_size_are_together_while_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In groups of similar sizes, of so many coordinates at the most unless one has more."""
    monkeypatch.setattr(kernel_segments, "TOGETHER", 24)
    assert [*kernel_segments._groups((4, 1, 2, 30, 3, 4), 2)] == [[1, 2, 4], [0, 5], [3]]
