"""What a pass of the exact form gets wrong is within what `PassErrors` say."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, LARGE, Case

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.kernels.adder import PROBED, UNIT, UNPROBED, chain_error
from otdd_flash.kernels.segments.step import DIGITS
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments


def exact_softmin(own, opposite, g, epsilon):
    """Of the cost between centred points, float64."""
    x, y = (side.points.double() for side in (own, opposite))
    scores = 2 * (x - own.masses @ x) @ (y - opposite.masses @ y).T + g
    return -epsilon * torch.logsumexp(opposite.masses.log() + scores / epsilon, 1)


def wrong(clouds, epsilon, noise):
    """Errors of f after evaluating potentials of size `noise`, and their bound: of one pair."""
    pool = ClassPool(clouds)
    rows, columns = (torch.tensor([k], device=DEVICE) for k in (0, 1))
    segments = KernelSegments(pool, rows, columns, small=False)
    vectors = segments._vectors
    candidate = vectors.columns.candidate
    draw = torch.Generator().manual_seed(3)
    candidate.copy_(noise * torch.randn(len(candidate), generator=draw).to(DEVICE))
    level = torch.tensor([epsilon], dtype=torch.float64, device=DEVICE)
    segments.numbers(level, torch.ones(1, dtype=torch.bool, device=DEVICE))
    f, g = vectors.rows.double(), candidate.double()
    error = (f - exact_softmin(*clouds, g, epsilon)).abs()
    errors = segments.errors
    bound = errors.largest + epsilon * errors.sums + UNIT * f.abs()
    return error, bound


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], CASES[3], LARGE[2], LARGE[3]])
@pytest.mark.parametrize("epsilon", [1e-2, 1.0, 1e4])
def test_softmins_are_within_their_errors(sizes, dim, pairs, epsilon):
    clouds = [Case(sizes, dim, pairs).clouds[k] for k in pairs[0]]
    error, bound = wrong(clouds, epsilon, 1.0)
    assert bool((error <= bound).all())


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.0, 1e3])
def test_whole_numbers_lose_nothing_but_the_last_bits(noise):
    """Of one-hot points, so that exponents are known; potentials are far above epsilon."""
    points = torch.eye(40).repeat_interleave(7, 0).to(DEVICE)
    clouds = [
        WeightedPoints(part, torch.full((len(part),), 1 / len(part)).double().to(DEVICE))
        for part in (points, points[:133])
    ]
    epsilon = 0.02
    error, bound = wrong(clouds, epsilon, noise)
    assert bool((error <= bound).all())
    # With logits in one float32 it would be a unit of the potentials, beside what f loses.
    assert float(bound.max()) < UNIT * (5 * noise + 40)


def test_products_keep_more_than_twenty_digits_of_two():
    """Per-point bounds of a random class are some units in the last place of ||x|| ||y||."""
    case = Case([300, 250], 784, [(0, 1)])
    error = float(case.segments.errors.largest[0])
    reach = 2 * float(case.pool.radii[0] * case.pool.radii[1])
    most = 2 if case.pool.chain_error < 400 * UNIT else 24
    assert error < most * UNIT * reach


def test_digits_add_up_to_their_points():
    case = Case([130, 33], 70, [(0, 1)])
    pool = case.pool
    digits = pool.pool.coordinates.double().unflatten(0, (DIGITS, -1))
    for k, cloud in enumerate(case.clouds):
        centred = cloud.points.double() - cloud.masses @ cloud.points.double()
        lost = (centred - case.points(k)[:, :70]).norm(dim=1).max()
        assert float(lost) <= float(pool.norms[k, 3]) * (1 + 1e-3) + 1e-15
        rows = slice(int(pool.starts[k]), int(pool.starts[k]) + len(centred))
        for place, digit in ((1, 2), (2, 3)):
            largest = float((digits[digit, rows] * pool.units[k]).norm(dim=1).max())
            assert largest == pytest.approx(float(pool.norms[k, place]), rel=1e-6)


def test_chains_cost_what_the_adder_says():
    """16 products and two extra bits: 17 / 2 + 2 units a step; one product and none: 6."""
    slack = 1 + 2.0**-7
    assert 10.5 * 16 * UNIT <= chain_error(256, PROBED[9]) < 10.5 * 16 * UNIT * slack
    assert 6 * 256 * UNIT <= chain_error(256, UNPROBED) < 6 * 256 * UNIT * slack
