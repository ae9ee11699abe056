"""Steps in kernels are those of the PyTorch reference, whatever they are given."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from otdd_flash.solver.quasi_newton import MEMORY, Track, begin, restart
from pairwise import pairwise
from torch import Tensor

from otdd_flash.engine.trust import GROWTH, PATIENCE
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver.alternating import alternate, solve_alternating
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.symmetric import average, solve_symmetric

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float64]
SIZES = [(1, 1), (1, 2), (2, 1), (7, 129), (129, 7), (300, 1000)]
SELF_SIZES = [1, 2, 129, 300]


class InTriton:
    """An operator whose steps run in kernels."""

    in_triton = True

    def __init__(self, operator: object) -> None:
        self.inner = operator

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Drawn:
    """An operator whose softmins are drawn at random, the next ones at each step.

    Masses are drawn too; every third point has none, where there are three.
    """

    in_triton = False

    def __init__(self, n: int, m: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.shape, self.dtype, self.scale = (n, m), dtype, scale
        self.a = masses(n, 1, zeros=True)
        self.b = self.a if n == m else masses(m, 2, zeros=True)
        self.step = 0

    def softmin_rows(self, g: Tensor, epsilon: float, guess: Tensor) -> Tensor:
        return self._near(guess, 10 * self.step)

    def softmin_columns(self, f: Tensor, epsilon: float, guess: Tensor) -> Tensor:
        return self._near(guess, 10 * self.step + 1)

    def _near(self, potential: Tensor, seed: int) -> Tensor:
        return potential + self.scale * draw(len(potential), seed).to(potential)


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def masses(n: int, seed: int, *, zeros: bool) -> Tensor:
    weights = draw(n, seed).abs().double() + 0.1
    if zeros and n > 2:
        weights[::3] = 0
    return (weights / weights.sum()).to(DEVICE)


def clouds(n: int, m: int, dtype: torch.dtype, *, zeros: bool) -> StoredOperator:
    """The cost between two clouds, or of one with itself where n = m."""
    x, y = (draw(3 * size, size).reshape(size, 3) for size in (n, m))
    cost = reference.dense_cost(x, x if n == m else y + 1).to(DEVICE, dtype)
    a = masses(n, 1, zeros=zeros)
    return StoredOperator.from_cost(cost, a, a if n == m else masses(m, 2, zeros=zeros))


def start(n: int, m: int, dtype: torch.dtype) -> Track:
    return begin(torch.zeros(n, dtype=dtype, device=DEVICE), draw(m, 3).to(DEVICE, dtype))


def assert_same(found: Track, expected: Track) -> None:
    """Equal up to the rounding of sums, and that of potentials to their type."""
    scale = max(1.0, float(expected.g.abs().max()))
    rounding = max(4 * torch.finfo(expected.g.dtype).eps, 1e-11)
    for name in ("f", "g", "updated", "candidate"):
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(one, other, rtol=0, atol=rounding * scale)
    for name, power in (("numbers", 1), ("memory", 1), ("products", 2)):
        one, other = getattr(found, name), getattr(expected, name)
        atol = 1e-13 * scale**power
        torch.testing.assert_close(one, other, rtol=1e-9, atol=atol)


@pytest.mark.slow(after=3)
@pairwise(size=[*SIZES, *((n,) for n in SELF_SIZES)], zeros=[False, True], dtype=DTYPES)
def test_steps_are_those_of_the_reference(size, zeros, dtype):
    step, n, m = (alternate if len(size) == 2 else average), size[0], size[-1]
    operator = clouds(n, m, dtype, zeros=zeros)
    epsilon = 0.01 * operator.mean_cost + 1e-3
    track = start(n, m, dtype)
    for _ in range(3):
        found = Track(*step(InTriton(operator), epsilon, track))
        track = Track(*step(operator, epsilon, track))
        assert_same(found, track)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("step", "n", "m"), [(alternate, 40, 130), (average, 130, 130)])
def test_a_full_memory_forgets_the_oldest(step, n, m, dtype):
    operator = clouds(n, m, dtype, zeros=True)
    epsilon = 0.01 * operator.mean_cost
    track = start(n, m, dtype)
    for _ in range(MEMORY + 4):
        found = Track(*step(InTriton(operator), epsilon, track))
        track = Track(*step(operator, epsilon, track))
        assert_same(found, track)
    assert bool((track.memory[0].abs().sum(1) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("step", "n", "m"), [(alternate, 150, 70), (average, 300, 300)])
def test_rejected_steps_are_those_of_the_reference(step, n, m, dtype):
    operator = Drawn(n, m, dtype)
    track, rejected = start(n, m, dtype), 0
    for operator.step in range(MEMORY):
        found = Track(*step(InTriton(operator), 1.0, track))
        new = Track(*step(operator, 1.0, track))
        assert_same(found, new)
        rejected += int(torch.equal(new.g, track.g))
        track = new
    assert rejected >= 2
    assert float(track.named.plain) + float(track.named.penalty) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("step", "n", "m"), [(alternate, 5, 9000), (average, 5000, 5000)])
def test_points_beyond_what_one_program_takes_at_once(step, n, m):
    operator = Drawn(n, m, torch.float32)
    track = start(n, m, torch.float32)
    for operator.step in range(2):
        found = Track(*step(InTriton(operator), 1.0, track))
        track = Track(*step(operator, 1.0, track))
        assert_same(found, track)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("step", [alternate, average])
def test_what_is_not_finite_is_not_kept_and_not_remembered(step, bad):
    operator, size = clouds(40, 40, torch.float32, zeros=True), 40
    track = start(size, size, torch.float32)
    for _ in range(3):
        track = Track(*step(operator, 0.1, track))
    spoilt = Track(*(tensor.clone() for tensor in track))
    spoilt.candidate[7] = bad
    # Else it would be kept whatever it is.
    spoilt.named.plain.zero_()
    found = Track(*step(InTriton(operator), 0.1, spoilt))
    assert_same(found, Track(*step(operator, 0.1, spoilt)))
    assert torch.equal(found.memory, track.memory)
    assert torch.equal(found.g, track.g)
    assert bool(found.candidate.isfinite().all())


def test_a_direction_that_is_not_finite_gives_way_to_the_plain_update():
    operator = clouds(40, 30, torch.float64, zeros=True)
    track = start(40, 30, torch.float64)
    for _ in range(4):
        track = Track(*alternate(operator, 1.0, track))
    # The newest curvature, of which a direction takes the inverse.
    track.products[0, -1, MEMORY - 1] = math.nan
    found = Track(*alternate(InTriton(operator), 1.0, track))
    assert torch.equal(found.g, track.candidate)
    assert float(found.named.plain) == 0
    torch.testing.assert_close(found.candidate, found.updated)


@pytest.mark.parametrize(
    ("growth", "stale", "kept"),
    [(GROWTH - 0.1, PATIENCE - 1, True), (GROWTH - 0.1, PATIENCE, False), (GROWTH + 0.1, 0, False)],
)
def test_where_the_dual_cannot_tell_the_marginal_error_decides(growth, stale, kept):
    operator = clouds(40, 30, torch.float64, zeros=True)
    track = start(40, 30, torch.float64)
    for _ in range(3):
        track = Track(*alternate(operator, 0.5, track))
    seen = Track(*alternate(operator, 0.5, restart(track, track.candidate)))
    numbers = seen.named._replace(
        gain=torch.zeros_like(seen.gap),
        lowest=seen.gap / growth,
        stale=torch.full_like(seen.gap, stale),
    )
    undecided = track._replace(numbers=torch.stack(numbers))
    found = Track(*alternate(InTriton(operator), 0.5, undecided))
    assert_same(found, Track(*alternate(operator, 0.5, undecided)))
    assert torch.equal(found.g, track.candidate) == kept


@pytest.mark.slow
def test_a_shift_by_a_constant_teaches_nothing():
    """Its products without means are the rounding of those with them."""
    for size in range(3, 15):
        operator = Drawn(4, size, torch.float64, scale=0)
        track = start(4, size, torch.float64)
        track = Track(*alternate(InTriton(operator), 1.0, track._replace(updated=track.g + 0.3)))
        shifted = track._replace(candidate=track.g + 0.7, updated=track.updated + 0.3)
        found = Track(*alternate(InTriton(operator), 1.0, shifted))
        assert not bool(found.memory.any())


def test_a_self_term_may_start_any_constant_away():
    operator = clouds(60, 60, torch.float64, zeros=True)
    track = start(60, 60, torch.float64)
    far = track._replace(candidate=track.candidate + 1e4)
    found = Track(*average(InTriton(operator), 0.05, far))
    near = Track(*average(InTriton(operator), 0.05, track))
    torch.testing.assert_close(found.f, near.f, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.gap, near.gap, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("relative", [0.3, 0.02])
def test_whole_solves_are_those_of_the_reference(relative):
    options = Converged(1e-3)
    cross, same = (clouds(40, m, torch.float32, zeros=True) for m in (33, 40))
    for solve, operator in ((solve_alternating, cross), (solve_symmetric, same)):
        epsilon = relative * operator.mean_cost
        expected = solve(operator, epsilon, options)
        found = solve(InTriton(operator), epsilon, options)
        assert found.converged
        assert found.iterations <= expected.iterations + 2
        assert expected.bounds[0] <= found.value <= expected.bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("step", [alternate, average])
def test_two_runs_agree_bit_for_bit(step):
    operator = Drawn(3000, 3000, torch.float32)
    track = start(3000, 3000, torch.float32)
    first, second = (step(InTriton(operator), 0.5, track) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("step", "n", "m"),
    [(alternate, 10_007, 60_001), (alternate, 150_000, 333), (average, 70_001, 70_001)],
)
def test_steps_of_many_points_are_those_of_the_reference(step, n, m, dtype):
    operator = Drawn(n, m, dtype, scale=0.3)
    track = start(n, m, dtype)
    for operator.step in range(MEMORY + 4):
        found = Track(*step(InTriton(operator), 0.7, track))
        track = Track(*step(operator, 0.7, track))
        assert_same(found, track)
