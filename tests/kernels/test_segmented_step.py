"""The segmented half-step and its softmin against dense float64, and the pool that they read."""

from __future__ import annotations

import math

import pytest
import torch
from segmented_cases import CASES, DEVICE, LARGE, Case, classes, close

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.kernels.segments.step import DIGITS, OVERRUN, segment_tile
from otdd_flash.operators.class_pool import ClassPool


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), CASES + LARGE)
def test_the_potentials_of_rows_are_the_softmin(sizes, dim, pairs, coarse):
    case = Case(sizes, dim, pairs, coarse=coarse)
    found = case.evaluate()
    for segment, f in enumerate(case.potentials(0)):
        expected = case.softmin(segment, 0, case.potentials(1)[segment])
        close(case, segment, f, expected)
        masses = case.masses(segment, 0)
        torch.testing.assert_close(found.row_value[segment], masses @ f)
        torch.testing.assert_close(found.row_size[segment], masses @ f.abs())


@pytest.mark.slow
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), CASES + LARGE)
def test_the_residual_is_that_of_the_softmin_of_the_rows(sizes, dim, pairs, coarse):
    case = Case(sizes, dim, pairs, coarse=coarse)
    case.evaluate()
    for segment, fresh in enumerate(case.columns("fresh")):
        updated = fresh + case.potentials(1)[segment]
        close(case, segment, updated, case.softmin(segment, 1, case.potentials(0)[segment]))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], CASES[2], *LARGE[:2]])
def test_a_class_with_itself_has_one_potential(sizes, dim, pairs):
    case = Case(sizes, dim, [(k, k) for k in range(len(sizes))], themselves=True)
    found = case.evaluate()
    assert torch.equal(found.row_value, found.value)
    assert torch.equal(found.row_size, found.size)
    for segment, fresh in enumerate(case.columns("fresh")):
        potential = case.potentials(1)[segment]
        close(case, segment, fresh + potential, case.softmin(segment, 0, potential))


@pytest.mark.slow
def test_segments_that_are_not_active_keep_their_potentials():
    case = Case([33, 130, 5], 3, [(1, 0), (1, 2), (0, 2)])
    case.evaluate()
    before = [*case.potentials(0), *case.columns("fresh")]
    case.vectors.columns.candidate.mul_(0.9)
    case.evaluate(torch.tensor([True, False, True], device=DEVICE))
    after = [*case.potentials(0), *case.columns("fresh")]
    same = [torch.equal(one, two) for one, two in zip(before, after, strict=True)]
    assert same == [False, True, False] * 2


def test_a_pool_rounds_every_class_by_itself():
    """And to more than float32's bits, about the class's own mean, whatever stands beside it."""
    cloud = classes([40], 6)[0]
    far = WeightedPoints(cloud.points * 1e4 - 3e5, cloud.masses)
    alone, beside = ClassPool([cloud]), ClassPool([far, cloud])
    rows = alone.pool.coordinates[:40]
    assert torch.equal(rows, beside.pool.coordinates[40:80])
    digits = alone.pool.coordinates.unflatten(0, (DIGITS, -1))
    assert digits.shape[1] == 40 + OVERRUN
    seen = digits[1:, :40].double().sum(0) * alone.units
    centred = cloud.points.double() - cloud.masses @ cloud.points.double()
    assert float((seen[:, :6] - centred).abs().max()) < 2**-33 * float(centred.abs().max())
    assert torch.equal(digits[1].round(), digits[1])
    assert float(digits[1].double().norm(dim=1).max()) <= 2**12
    torch.testing.assert_close(alone.variances[0], cloud.masses @ centred.square().sum(1))
    assert math.isclose(float(alone.radii[0]), float(centred.norm(dim=1).max()))
    assert segment_tile(8, 1, True, DEVICE)[0] == 64
