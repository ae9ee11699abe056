"""Kernels over stored scores: how scores are rounded, and half-steps and sums of plans."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.stored import stored_plan, stored_product, stored_programs, stored_step
from otdd_flash.operators.kernel_pool import KernelPool
from otdd_flash.operators.score_pool import Room, tables_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES, ROOM = (37, 21), (48, 32)
EPSILON, LEAST = 0.4, -700.0


def numbers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=draw, dtype=torch.float64)


class Clouds:
    """Two labelled clouds with masses, one of which is 0, and their costs, all dense."""

    def __init__(self, dtype: torch.dtype = torch.float32, far: float = 0.0) -> None:
        self.points = [numbers(n, 5, seed=n).to(dtype) + far for n in SIZES]
        self.masses = [numbers(n, seed=n + 1) + 0.1 for n in SIZES]
        self.masses[0][3] = 0.0
        self.masses = [masses / masses.sum() for masses in self.masses]
        self.labels = [torch.arange(SIZES[0]) % 3, 3 + torch.arange(SIZES[1]) % 2]
        table = numbers(5, 5, seed=7)
        # The block [y, x] is never read.
        self.table = table + table.T
        self.lambda_x, self.lambda_y = 0.5, 0.7

    def cost(self, one: int, two: int) -> Tensor:
        return reference.dense_cost(
            self.points[one],
            self.points[two],
            self.lambda_x,
            self.lambda_y * self.table,
            self.labels[one],
            self.labels[two],
        )

    def pool(self) -> KernelPool:
        """In a room that is larger, with other points in what is left of it."""
        room = Room(1, *ROOM, 5, 8, self.points[0].dtype, DEVICE)
        pool = KernelPool(room)
        pool.points.fill_(17.0)
        pool.labels.fill_(6)
        for side, first in enumerate((0, ROOM[0])):
            here = slice(first, first + SIZES[side])
            pool.points[0, here] = self.points[side].to(DEVICE)
            pool.masses[0, here] = self.masses[side].to(DEVICE)
            pool.labels[0, here] = self.labels[side].to(DEVICE)
        given = self.table.clone()
        given[3:, :3] = math.nan
        pool.class_distances[0, :5, :5] = given.nan_to_num(0.25)
        weights = (self.lambda_x, self.lambda_y, 3.0)
        pool.of_costs.copy_(torch.tensor(weights, dtype=torch.float64))
        pool.prepare(own=True)
        return pool


CLOUDS = Clouds()
PLACES = slice(0, SIZES[0]), slice(ROOM[0], ROOM[0] + SIZES[1])
BLOCKS = [(0, 0), (1, 1), (0, 1), (1, 0)]


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 0.0), (torch.float64, 1e3)])
def test_scores_are_costs_rounded_once(dtype: torch.dtype, far: float) -> None:
    """Also of clouds that are far from 0, and both ways to the last bit."""
    clouds = Clouds(dtype, far)
    pool = clouds.pool()
    found = -pool.scores[0].double().cpu()
    for one, two in BLOCKS:
        block, cost = found[PLACES[one], PLACES[two]], clouds.cost(one, two)
        torch.testing.assert_close(
            block, cost, rtol=2**-24 + 1e-12, atol=1e-10 * (1 + far**2) / 1e6
        )
        assert torch.equal(block, found[PLACES[two], PLACES[one]].T)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("epsilon", "symmetric"), [(1e-3, False), (0.4, True), (1e4, False)])
def test_half_steps_are_softmins(epsilon: float, symmetric: bool) -> None:
    """As accurate as potentials in float32 are."""
    pool = CLOUDS.pool()
    room = pool.room
    tables = tables_of(room, *SIZES, symmetric=symmetric)
    full = tables_of(room, *ROOM, symmetric=symmetric)
    sides = BLOCKS[:2] if symmetric else BLOCKS[2:]
    levels = torch.full((len(tables[0]),), epsilon, dtype=torch.float64, device=DEVICE)
    active = torch.ones(len(levels), dtype=torch.bool, device=DEVICE)
    for k, (table, most) in enumerate(zip(tables, full, strict=True)):
        entries = room.points if symmetric else room.n
        potential = (numbers(entries, seed=5) - 0.5).float().to(DEVICE)
        highest = torch.zeros(entries, dtype=torch.float32, device=DEVICE)
        sums = Sums(highest, torch.ones_like(highest, dtype=torch.float64))
        programs = stored_programs(most.to(DEVICE))
        log2_masses = pool.log2_masses.view(-1)
        stored_step(
            pool.scores, log2_masses, programs, table.to(DEVICE), active, levels, potential, sums
        )
        found = (-epsilon * math.log(2) * (sums.highest.double() + sums.sums.log2())).cpu()
        for one, two in sides if symmetric else sides[k : k + 1]:
            rows, columns = PLACES[one], PLACES[two]
            if not symmetric:
                rows, columns = slice(0, SIZES[one]), slice(0, SIZES[two])
            cost, b = CLOUDS.cost(one, two), CLOUDS.masses[two]
            expected = reference.softmin_rows(cost, b, potential.cpu()[columns], epsilon)
            size = float(cost.max()) + epsilon * 4
            torch.testing.assert_close(found[rows], expected, rtol=0, atol=4 * 2**-24 * size)


@pytest.mark.parametrize("epsilon", [0.02, 100.0])
def test_sums_of_plans_in_float64(epsilon: float) -> None:
    """Of float64 potentials; what stands where there is no mass does not count."""
    scores = CLOUDS.pool().scores[:, PLACES[0], PLACES[1]]
    f, g = numbers(SIZES[0], seed=1), numbers(SIZES[1], seed=2)
    b = CLOUDS.masses[1].clone()
    b[5], g[5] = 0.0, math.inf
    level = torch.tensor(epsilon, dtype=torch.float64, device=DEVICE)
    sides = [side.to(DEVICE)[None] for side in (f, g, b)]
    found = stored_plan(scores, *sides, level, LEAST)[0].cpu()
    exponents = (f[:, None] + g + scores[0].double().cpu()) / epsilon
    entries = torch.where(b > 0, b * exponents.clamp_min(LEAST).exp(), 0)
    torch.testing.assert_close(found, entries.sum(1), rtol=1e-13, atol=0)
    expected = torch.where(b > 0, scores[0].double().cpu() * b, 0).sum(1)
    (found,) = stored_product(scores, sides[2]).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
