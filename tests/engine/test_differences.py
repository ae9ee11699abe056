"""L-BFGS on products against Nocedal's recursion on vectors."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.engine.differences import Differences

POINTS, MEMORY = 12, 8


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
        """A step without a mean, and the residual difference over it."""
        step = self.random(POINTS)
        step -= self.weights @ step
        change = self.jacobian @ step
        return step, change - self.weights @ change

    def products(self, vector):
        return (self.vectors * self.weights) @ vector


def two_loops(residual, history, weights):
    """Nocedal's recursion, one pair of a step and its residual difference after the other."""
    products = [(weights @ (s * y), weights @ (y * y)) for s, y in history]
    result, factors = residual.clone(), []
    for (s, y), (curvature, _) in zip(reversed(history), reversed(products), strict=True):
        factors.append(weights @ (s * result) / curvature)
        result = result - factors[-1] * y
    result = result * sum(sy for sy, _ in products) / sum(yy for _, yy in products)
    for (s, y), (curvature, _), factor in zip(history, products, reversed(factors), strict=True):
        result = result + (factor - weights @ (y * result) / curvature) * s
    return result


def learn_all(rings, rounds, sound=lambda round_, k: True):
    """The differences of several problems learnt together."""
    found = Differences(torch.zeros(len(rings), dtype=torch.float64), MEMORY)
    for round_ in range(rounds):
        products, learnt = [], []
        for k, ring in enumerate(rings):
            step, change = ring.differences()
            slot, here = int(found.slot[k]), sound(round_, k)
            vectors = ring.vectors.clone()
            vectors[slot], vectors[slot + MEMORY] = step, change
            products.append((vectors * ring.weights) @ change)
            learnt.append(here)
            if here:
                ring.vectors, ring.history = vectors, [*ring.history, (step, change)]
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
def test_the_matrix_form_is_the_recursion(rounds):
    """However often the ring went round, and with differences that some did not learn."""
    rings = [Ring(seed) for seed in range(3)]
    found = learn_all(rings, rounds, lambda round_, k: k != 1 or round_ % 3 == 0)
    residuals = centred_residuals(rings)
    for ring, residual, direction in zip(
        rings, residuals, directions(found, rings, residuals), strict=True
    ):
        expected = two_loops(residual, ring.history[-MEMORY:], ring.weights)
        torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-8)


def test_nothing_remembered_has_no_direction():
    zeros = torch.zeros(2, MEMORY, dtype=torch.float64)
    scale, _ = Differences(torch.zeros(2, dtype=torch.float64), MEMORY).direction(zeros, zeros)
    assert not bool(scale.isfinite().any())
