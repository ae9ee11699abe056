"""L-BFGS on products against its form for one problem, on vectors."""

from __future__ import annotations

import pytest
import torch
from otdd_flash.solver.segmented_differences import Differences

from otdd_flash.engine.segments import MEMORY
from otdd_flash.solver import quasi_newton

POINTS = 12


class Ring:
    """What one problem remembers, as vectors."""

    def __init__(self, seed):
        draw = torch.Generator().manual_seed(seed)

        def random(*size):
            return torch.randn(*size, generator=draw, dtype=torch.float64)

        self.random, self.weights = random, random(POINTS).square() + 0.1
        self.weights /= self.weights.sum()
        half = random(POINTS, POINTS)
        # Self-adjoint in the metric of the weights, with positive eigenvalues.
        self.jacobian = (half @ half.T + torch.eye(POINTS)) * self.weights
        self.vectors = torch.zeros(2 * MEMORY, POINTS, dtype=torch.float64)
        self.history = []

    def differences(self):
        """A step without a mean, and the fall of the residual over it."""
        step = self.random(POINTS)
        step -= self.weights @ step
        fall = self.jacobian @ step
        return step, fall - self.weights @ fall

    def products(self, vector):
        return (self.vectors * self.weights) @ vector


def learn_all(rings, rounds, sound=lambda round_, k: True):
    """The differences of several problems learnt together."""
    found = Differences(torch.zeros(len(rings), dtype=torch.float64))
    for round_ in range(rounds):
        products, learnt = [], []
        for k, ring in enumerate(rings):
            step, fall = ring.differences()
            slot, here = int(found.slot[k]), sound(round_, k)
            vectors = ring.vectors.clone()
            vectors[slot], vectors[slot + MEMORY] = step, fall
            products.append((vectors * ring.weights) @ fall)
            learnt.append(here)
            if here:
                ring.vectors, ring.history = vectors, [*ring.history, (step, fall)]
        found.learn(torch.tensor(learnt), *torch.stack(products).chunk(2, 1))
    return found


def directions(found, rings, residuals):
    products = [ring.products(r) for ring, r in zip(rings, residuals, strict=True)]
    scale, weights = found.direction(*torch.stack(products).chunk(2, 1))
    return [
        scale[k] * residual + weights[k] @ ring.vectors
        for k, (ring, residual) in enumerate(zip(rings, residuals, strict=True))
    ]


def centred_residuals(rings):
    residuals = [ring.random(POINTS) for ring in rings]
    return [r - ring.weights @ r for ring, r in zip(rings, residuals, strict=True)]


@pytest.mark.parametrize("rounds", [1, MEMORY - 1, MEMORY, MEMORY + 1, 3 * MEMORY + 2])
def test_directions_are_those_of_one_problem(rounds):
    """However often the ring went round, and with differences that some did not learn."""
    rings = [Ring(seed) for seed in range(3)]
    found = learn_all(rings, rounds, lambda round_, k: k != 1 or round_ % 3 == 0)
    residuals = centred_residuals(rings)
    for ring, residual, direction in zip(
        rings, residuals, directions(found, rings, residuals), strict=True
    ):
        memory = torch.zeros(2, quasi_newton.MEMORY, POINTS, dtype=torch.float64)
        newest = ring.history[-MEMORY:]
        for kind, vectors in enumerate(zip(*newest, strict=True)):
            memory[kind, -len(newest) :] = torch.stack(vectors)
        others = torch.cat((memory[1], residual[None])) * ring.weights
        expected = quasi_newton._direction(residual, memory, memory @ others.T, 1.0)
        torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-8)


def test_the_newest_fall_is_led_back_to_its_step():
    """The secant equation of quasi-Newton methods."""
    rings = [Ring(seed) for seed in range(3)]
    found = learn_all(rings, 2 * MEMORY + 1)
    falls = [ring.history[-1][1] for ring in rings]
    for ring, direction in zip(rings, directions(found, rings, falls), strict=True):
        torch.testing.assert_close(direction, ring.history[-1][0], rtol=1e-8, atol=1e-8)


def test_problems_that_stay_keep_theirs():
    rings = [Ring(seed) for seed in range(4)]
    found = learn_all(rings, MEMORY + 1)
    residuals = centred_residuals(rings)
    expected = directions(found, rings, residuals)
    order = [3, 1]
    found.keep(torch.tensor(order))
    stayed = directions(found, [rings[k] for k in order], [residuals[k] for k in order])
    for k, direction in zip(order, stayed, strict=True):
        assert torch.equal(direction, expected[k])


def test_nothing_remembered_has_no_direction():
    zeros = torch.zeros(2, MEMORY, dtype=torch.float64)
    scale, _ = Differences(torch.zeros(2, dtype=torch.float64)).direction(zeros, zeros)
    assert not bool(scale.isfinite().any())
