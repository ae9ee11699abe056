"""Class distances in kernels, from end to end: in the interpreter, and larger ones on a GPU."""

from __future__ import annotations

import pytest
import torch
from sinkhorn_cases import make_clouds, moved

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.labels import kernel_terms
from otdd_flash.labels import sinkhorn_pairs as transport_terms
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import BYTES_PER_SEGMENT, KernelSegments, bytes_of
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def in_kernels(monkeypatch):
    """On a CPU too; gives a switch, on or off, that can also forbid the way out to float64.

    One of a thousand of `only_of` pairs may take it: near the tolerance one that is slow looks like
    one that rounding stops.
    """
    solve = transport_terms.solve_in_float64

    def switch(on, *, only_of=None):
        def refuse(classes, pairs, *rest):
            if only_of is not None and len(pairs) > only_of / 1_000:
                raise AssertionError(f"{len(pairs)} pairs solved in float64")
            return solve(classes, pairs, *rest)

        monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: on)
        monkeypatch.setattr(transport_terms, "solve_in_float64", refuse)

    switch(True)
    return switch


def test_kernels_agree_with_float64(in_kernels):
    """Of small classes alone, and between them and larger ones."""
    clouds = moved(make_clouds((1, 12, 70), dim=4, weighted=True), DEVICE)
    pairs = all_pairs(3)
    in_kernels(True, only_of=len(pairs))
    found = sinkhorn_distances(clouds, pairs, 1.0)
    in_kernels(False)
    expected = sinkhorn_distances(clouds, pairs, 1.0, 1e-9)
    assert bool((found.lower <= expected.upper).all())
    assert bool((found.upper >= expected.lower).all())
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)


def test_a_pair_does_not_depend_on_the_others_to_the_last_bit(in_kernels):
    clouds = moved(make_clouds((1, 12, 70, 5), dim=4, weighted=True), DEVICE)
    pairs = all_pairs(4)
    together = sinkhorn_distances(clouds, pairs, 8.0)
    for chosen in (torch.tensor([4]), torch.tensor([5, 1])):
        apart = sinkhorn_distances(clouds, pairs[chosen], 8.0)
        for one, two in zip(together, apart, strict=True):
            assert torch.equal(one[chosen], two)


def test_what_does_not_fit_the_memory_at_once_is_solved_in_parts(in_kernels, monkeypatch):
    clouds = moved(make_clouds((3, 12, 5), dim=4), DEVICE)
    together = sinkhorn_distances(clouds, all_pairs(3), 8.0)
    solved = []
    solve = kernel_terms.solve_cross_terms

    def counting(segments, *args):
        solved.append(len(segments.mean_cost))
        return solve(segments, *args)

    monkeypatch.setattr(kernel_terms, "solve_cross_terms", counting)
    monkeypatch.setattr(kernel_terms, "free_memory", lambda _: 20_000)
    parts = sinkhorn_distances(clouds, all_pairs(3), 8.0)
    assert len(solved) > 1
    assert sum(solved) == 3
    for one, two in zip(together, parts, strict=True):
        assert torch.equal(one, two)


def test_memory_counts_all_vectors():
    clouds = moved(make_clouds((300, 1, 40), dim=4), DEVICE)
    pool = ClassPool([WeightedPoints(cloud.points, cloud.masses) for cloud in clouds])
    rows, columns = torch.tensor([[0, 2, 1], [2, 0, 0]], device=DEVICE)
    segments = KernelSegments(pool, rows, columns, small=False)
    vectors = segments._vectors
    held = (*vectors.columns, *segments._sums, vectors.rows)
    taken = sum(values.numel() * values.element_size() for values in held)
    counted = bytes_of(pool.sizes[torch.stack((rows, columns), 1)])
    assert taken < int(counted.sum()) - 3 * BYTES_PER_SEGMENT < 3 * taken


@pytest.mark.parametrize(("epsilon", "tolerance"), [(2.0, 1e-8), (1e-7, 1e-3)])
def test_what_float32_cannot_reach_is_solved_in_float64(in_kernels, epsilon, tolerance):
    clouds = moved(make_clouds((3, 9, 5), dim=2, spread=0.3), DEVICE)
    found = sinkhorn_distances(clouds, all_pairs(3), epsilon, tolerance)
    in_kernels(False)
    expected = sinkhorn_distances(clouds, all_pairs(3), epsilon, tolerance)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_a_tolerance_near_the_rounding_floor_is_reached():
    """Over-relaxed iterations amplify rounding: they stayed at forty times this tolerance."""
    clouds = moved(make_clouds((15, 12), dim=4, seed=3), DEVICE)
    pool = ClassPool([WeightedPoints(cloud.points, cloud.masses) for cloud in clouds])
    rows, columns = torch.tensor([[1], [0]], device=DEVICE)
    segments = KernelSegments(pool, rows, columns, small=True)
    floor = float(solve_cross_terms(segments, 1.0, Converged(tolerance=1e-3)).rounding)
    segments = KernelSegments(pool, rows, columns, small=True)
    options = Converged(tolerance=2.2 * floor, max_iterations=60)
    terms = solve_cross_terms(segments, 1.0, options)
    assert 2.5 * float(terms.rounding) > options.asked_tolerance
    assert float(terms.marginal_error) <= options.asked_tolerance


# Sizes, dimension, epsilon and spread of classes; the last ones take several ranges of columns.
LARGE = [
    ([900, 1000, 1100, 64, 1], 784, 0.1, 0.3),
    ([64] * 60 + [50, 3, 1], 512, 0.1, 0.3),
    ([5000, 4500, 2100, 700], 64, 0.1, 1.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dim", "epsilon", "spread"), LARGE)
def test_large_problems_agree_with_float64(in_kernels, sizes, dim, epsilon, spread):
    clouds = moved(make_clouds(sizes, dim, weighted=True, spread=spread), DEVICE)
    pairs = all_pairs(len(sizes))
    in_kernels(True, only_of=len(pairs))
    found = sinkhorn_distances(clouds, pairs, epsilon)
    in_kernels(False)
    expected = sinkhorn_distances(clouds, pairs, epsilon, 1e-5)
    assert bool((found.lower <= expected.upper).all())
    assert bool((found.upper >= expected.lower).all())
    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("sizes", "dim", "epsilon", "spread"), LARGE)
def test_large_pairs_do_not_depend_on_the_others(in_kernels, kernels, sizes, dim, epsilon, spread):
    clouds = moved(make_clouds(sizes, dim, weighted=True, spread=spread), DEVICE)
    pairs = all_pairs(len(sizes))
    in_kernels(kernels, only_of=len(pairs) if kernels else None)
    together = sinkhorn_distances(clouds, pairs, epsilon)
    for chosen in (torch.tensor([0]), torch.arange(len(pairs))[1::3].flip(0)):
        apart = sinkhorn_distances(clouds, pairs[chosen], epsilon)
        for one, two in zip(together, apart, strict=True):
            assert torch.equal(one[chosen], two)
