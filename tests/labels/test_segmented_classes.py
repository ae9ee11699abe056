"""Segmented solves between classes, in float64 and in kernels: agreement, work and memory."""

from __future__ import annotations

import pytest
import torch
from sinkhorn_cases import make_clouds, moved

from otdd_flash.engine.problems import WeightedPoints
from otdd_flash.engine.quasi_newton import QuasiNewton
from otdd_flash.engine.quasi_newton_kernels import KernelVectors
from otdd_flash.formulas.decision import CROSS
from otdd_flash.labels import sinkhorn_pairs as transport_terms
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.operators import stored_segments
from otdd_flash.operators.kernel_segments import (
    BYTES_PER_SEGMENT,
    MEMORY,
    ClassPool,
    KernelSegments,
    bytes_of,
)
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_segments


def weighted_points(clouds):
    return [WeightedPoints(cloud.points, cloud.masses) for cloud in clouds]


@pytest.fixture
def clouds():
    return make_clouds((3, 30, 17, 45), dim=5, weighted=True, spread=1.5)


class Noisy(StoredSegments):
    """Problems whose marginal errors rounding keeps above a threshold."""

    dtype = torch.float32
    threshold = 0.0

    def coarse(self, tolerance):
        return None

    def iterations(self, *given):
        found = super().iterations(*given)
        evaluate = found.vectors.evaluate

        def evaluated(epsilon, active):
            seen = evaluate(epsilon, active)
            return seen._replace(gap=seen.gap.clamp_min(self.threshold))

        found.vectors.evaluate = evaluated
        return found


@pytest.mark.slow
def test_what_rounding_keeps_from_the_tolerance_ends(clouds):
    """Although the floor is below it, and says that rounding is all of its error."""
    points = weighted_points(clouds)
    sides = [(points[1], points[2])]
    reached = solve_segments(Noisy(sides, (32, 32)), CROSS, 0.5, Converged(tolerance=1e-4))
    floor = float(reached.rounding)
    assert float(reached.marginal_error) <= 1e-4
    noisy = Noisy(sides, (32, 32))
    noisy.threshold = 4 * floor
    terms = solve_segments(noisy, CROSS, 0.5, Converged(tolerance=3 * floor))
    assert float(terms.marginal_error) == pytest.approx(5 * floor, rel=0.05)
    assert float(terms.rounding) == float(terms.marginal_error)
    assert int(terms.iterations) < 200


def count_work(monkeypatch):
    """Scores that softmins have read, by what holds them."""
    read = {"anchored": 0, "stored": 0}
    tiles = stored_segments.tiles

    def counting(size, dtype, device):
        # To such a tolerance anchors hold float32.
        read["anchored" if dtype == torch.float32 else "stored"] += size[0] * size[1] * size[2]
        return tiles(size, dtype, device)

    monkeypatch.setattr(stored_segments, "tiles", counting)
    return read


@pytest.mark.slow
def test_a_pair_that_is_done_costs_nothing_more(clouds, monkeypatch):
    """The work on three pairs at once is that on each alone, though one takes far less."""
    points = weighted_points(clouds)
    easy = WeightedPoints(points[1].points * 1e-3, points[1].masses)
    hard = WeightedPoints(points[2].points * 4, points[2].masses)
    sides = [
        (easy, easy._replace(points=easy.points * 2)),
        (points[1], hard),
        (hard, points[2]),
    ]
    options = Converged(tolerance=1e-3)
    work, iterations = [], []
    for chosen in (sides, sides[:1], sides[1:2], sides[2:]):
        with monkeypatch.context() as patch:
            read = count_work(patch)
            terms = solve_segments(StoredSegments(chosen, (32, 32)), CROSS, 0.1, options)
            work.append(read)
            iterations.append(terms.iterations.tolist())
    assert iterations[0] == [iterations[k][0] for k in (1, 2, 3)]
    assert min(iterations[0][1:]) > 5 * iterations[0][0]
    for name in ("anchored", "stored"):
        assert work[0][name] == sum(read[name] for read in work[1:])
    # Most scores are multiplied, not exponentiated.
    assert work[0]["anchored"] > 2 * work[0]["stored"] > 0


@pytest.mark.parametrize("far", [1.0, 19.0, 200.0])
def test_anchors_follow_the_potentials(clouds, far):
    """However far those went since the anchor was taken, in units of epsilon."""
    points = weighted_points(clouds)
    epsilon = torch.tensor([0.1, 0.7], dtype=torch.float64)
    stored = StoredSegments([(points[3], points[1]), (points[1], points[2])], (48, 32))
    anchored, g = stored.coarse(1e-3), stored.first
    active, before = torch.ones(2, dtype=torch.bool), torch.zeros_like(stored.row_masses)
    anchored.softmins(g, before, epsilon, active)
    draw = torch.Generator().manual_seed(0)
    moved = torch.randn(g.shape, generator=draw, dtype=torch.float64)
    g = g + far * epsilon[:, None] * moved.sign()
    found = anchored.softmins(g, before, epsilon, active)
    expected = stored.softmins(g, before, epsilon, active)
    for one, two, masses in zip(found, expected, stored.masses, strict=True):
        error = ((one - two) / epsilon[:, None])[masses > 0]
        assert float(error.abs().max()) < 1e-6


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.log1p])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_function_has_the_same_bits_at_the_end_of_a_tensor(function, dtype):
    """What the updates rely on, and `exp2` does not do; three threads end in mid-vector."""
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(100_003, generator=draw, dtype=dtype) * 30
    values = -values if function is torch.exp else values
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = function(values)
    finally:
        torch.set_num_threads(threads)
    pieces = torch.cat([function(piece) for piece in values.split(1001)])
    assert torch.equal(whole, pieces)


@pytest.mark.slow
def test_terms_are_those_of_the_iteration_that_was_enough(clouds, monkeypatch):
    """To the last bit, however many more are launched before the host asks."""
    points = weighted_points(clouds)
    sides = [(points[i], points[j]) for i, j in ((0, 1), (3, 2))]
    expected = solve_segments(StoredSegments(sides, (48, 48)), CROSS, 0.1, Converged())
    monkeypatch.setattr(QuasiNewton, "advance", lambda rule: [rule.step() for _ in range(40)])
    found = solve_segments(StoredSegments(sides, (48, 48)), CROSS, 0.1, Converged())
    for name in ("iterations", "marginal_error", "value", "lower", "upper", "rounding"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# In kernels, from end to end: in the interpreter, and larger ones on a GPU.

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


@pytest.mark.slow
def test_kernels_agree_with_float64_and_pairs_do_not_depend_on_others(in_kernels, monkeypatch):
    """Small classes alone, between them and larger ones, and where memory holds one pair alone."""
    clouds = moved(make_clouds((1, 12, 70), dim=4, weighted=True), DEVICE)
    pairs = all_pairs(3)
    in_kernels(True, only_of=len(pairs))
    found = sinkhorn_distances(clouds, pairs, 8.0)
    solved = []
    solve = transport_terms.solve_segments

    def counting(segments, form, *args):
        if form is CROSS:
            solved.append(len(segments.mean_cost))
        return solve(segments, form, *args)

    monkeypatch.setattr(transport_terms, "solve_segments", counting)
    monkeypatch.setattr(transport_terms, "free_memory", lambda _: 20_000)
    for one, two in zip(found, sinkhorn_distances(clouds, pairs.flip(0), 8.0), strict=True):
        assert torch.equal(one, two.flip(0))
    assert solved == [1, 1, 1]
    in_kernels(False)
    expected = sinkhorn_distances(clouds, pairs, 8.0, 1e-9)
    assert bool((found.lower <= expected.upper).all())
    assert bool((found.upper >= expected.lower).all())
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_memory_counts_all_vectors():
    clouds = moved(make_clouds((300, 1, 40), dim=4), DEVICE)
    pool = ClassPool([WeightedPoints(cloud.points, cloud.masses) for cloud in clouds])
    rows, columns = torch.tensor([[0, 2, 1], [2, 0, 0]], device=DEVICE)
    segments = KernelSegments(pool, rows, columns, small=False)
    vectors = KernelVectors(segments, segments.first, MEMORY)
    held = (*vectors.columns, *segments._sums, vectors.rows)
    taken = sum(values.numel() * values.element_size() for values in held)
    counted = bytes_of(pool.sizes[torch.stack((rows, columns), 1)])
    assert taken < int(counted.sum()) - 3 * BYTES_PER_SEGMENT < 3 * taken


# Sizes, dimension, epsilon and spread of classes; the last ones take several ranges of columns.
LARGE = [
    ([900, 1000, 1100, 64, 1], 784, 0.1, 0.3),
    ([64] * 60 + [50, 3, 1], 512, 0.1, 0.3),
    ([5000, 4500, 2100, 700], 64, 0.1, 1.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dim", "epsilon", "spread"), LARGE)
def test_large_problems_agree_with_float64(in_kernels, sizes, dim, epsilon, spread):
    """And neither of both depends on other pairs."""
    clouds = moved(make_clouds(sizes, dim, weighted=True, spread=spread), DEVICE)
    pairs, found = all_pairs(len(sizes)), {}
    some = torch.arange(len(pairs))[1::3].flip(0)
    for kernels, tolerance in ((True, 1e-3), (False, 1e-5)):
        in_kernels(kernels, only_of=len(pairs) if kernels else None)
        found[kernels] = sinkhorn_distances(clouds, pairs, epsilon, tolerance)
        apart = sinkhorn_distances(clouds, pairs[some], epsilon, tolerance)
        for one, two in zip(found[kernels], apart, strict=True):
            assert torch.equal(one[some], two)
    assert bool((found[True].lower <= found[False].upper).all())
    assert bool((found[True].upper >= found[False].lower).all())
    torch.testing.assert_close(found[True].values, found[False].values, rtol=1e-3, atol=1e-3)
