"""The segmented solver: agreement with the solvers of one problem, stopping, and work done."""

from __future__ import annotations

import pytest
import reference
import torch
from sinkhorn_cases import cost_of, make_clouds

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import solve_in_float64
from otdd_flash.operators import anchored_segments, segment_tiles, stored_segments
from otdd_flash.operators.matrix import MatrixOperator
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms, solve_self_terms
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.symmetric import solve_symmetric


def weighted_points(clouds):
    return [WeightedPoints(cloud.points, cloud.masses) for cloud in clouds]


def operator_of(one, two):
    return MatrixOperator(cost_of(one, two), one.masses, two.masses)


@pytest.fixture
def clouds():
    return make_clouds((3, 30, 17, 45), dim=5, weighted=True, spread=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 50.0])
def test_terms_are_those_of_single_problems(clouds, epsilon):
    options = Converged(tolerance=1e-10)
    pairs = all_pairs(4)
    cross = solve_in_float64(weighted_points(clouds), pairs, epsilon, options)
    itself = torch.arange(4)[:, None].expand(-1, 2)
    own = solve_in_float64(weighted_points(clouds), itself, epsilon, options)
    for k, cloud in enumerate(clouds):
        expected = solve_symmetric(operator_of(cloud, cloud), epsilon, options)
        assert float(own.value[k]) == pytest.approx(expected.value, rel=1e-7, abs=1e-8)
    for index, (i, j) in enumerate(pairs.tolist()):
        expected = solve_alternating(operator_of(clouds[i], clouds[j]), epsilon, options)
        assert float(cross.value[index]) == pytest.approx(expected.value, rel=1e-7, abs=1e-8)
    for terms in (own, cross):
        assert float(terms.marginal_error.max()) <= 1e-10
        assert bool((terms.upper - terms.lower < 1e-6).all())


def test_the_marginal_error_is_that_of_the_certified_plan(clouds):
    """Known here from the potentials: an exact row update, then the columns' masses."""
    epsilon, tolerance = 0.3, 1e-2
    options = Converged(tolerance=tolerance)
    sides = [tuple(weighted_points([clouds[1], clouds[3]]))]
    segments = StoredSegments(sides, (32, 48))
    kept = []
    keep = segments.keep
    segments.keep = lambda order: (kept.append(segments.potentials), keep(order))
    term = solve_cross_terms(segments, epsilon, options)
    f = kept[0][0][0, :30]
    a, b, cost = clouds[1].masses, clouds[3].masses, cost_of(clouds[1], clouds[3])
    # The g before the last update is not kept, but f = T(g) has made the plan's mass 1.
    g = -epsilon * torch.logsumexp(a.log()[:, None] + (f[:, None] - cost) / epsilon, 0)
    assert float(a @ f + b @ g) >= float(term.value) - 1e-12
    assert float(a @ f + b @ g) <= float(term.upper)
    assert 0 < float(term.marginal_error) <= tolerance


@pytest.mark.slow
def test_a_slow_solve_takes_a_fraction_of_the_plain_iterations(clouds):
    """And a third of what plain ones over-relaxed by Nesterov's momentum take, 1015 in all."""
    options = Converged(tolerance=1e-3)
    pairs = torch.tensor([[1, 2], [3, 1], [3, 2]])
    terms = solve_in_float64(weighted_points(clouds), pairs, 0.02, options)
    plain = [
        reference.plain_iterations(
            cost_of(clouds[i], clouds[j]), clouds[i].masses, clouds[j].masses, 0.02, 1e-3
        )
        for i, j in pairs.tolist()
    ]
    assert sum(plain) > 10 * int(terms.iterations.sum())
    assert int(terms.iterations.sum()) < 340


def test_self_terms_take_half_of_the_averaged_updates():
    """Those take 14 to 16; and a mean that differences move takes hundreds."""
    clouds = make_clouds((30, 17, 45, 100), dim=5, weighted=True, spread=0.3)
    itself = torch.arange(4)[:, None].expand(-1, 2)
    terms = solve_in_float64(weighted_points(clouds), itself, 2.0, Converged(1e-5))
    assert int(terms.iterations.max()) <= 8


class Noisy(StoredSegments):
    """Problems whose marginal errors rounding keeps above a threshold."""

    dtype = torch.float32
    threshold = 0.0

    def coarse(self, tolerance):
        return None

    def evaluate(self, epsilon, active):
        seen = super().evaluate(epsilon, active)
        return seen._replace(gap=seen.gap.clamp_min(self.threshold))


@pytest.mark.slow
def test_what_rounding_keeps_from_the_tolerance_ends(clouds):
    """Although the floor is below it, and says that rounding is all of its error."""
    points = weighted_points(clouds)
    sides = [(points[1], points[2])]
    reached = solve_cross_terms(Noisy(sides, (32, 32)), 0.5, Converged(tolerance=1e-4))
    floor = float(reached.rounding)
    assert float(reached.marginal_error) <= 1e-4
    noisy = Noisy(sides, (32, 32))
    noisy.threshold = 4 * floor
    terms = solve_cross_terms(noisy, 0.5, Converged(tolerance=3 * floor))
    assert float(terms.marginal_error) == pytest.approx(5 * floor, rel=0.05)
    assert float(terms.rounding) == float(terms.marginal_error)
    assert int(terms.iterations) < 200


@pytest.mark.slow
def test_slow_convergence_far_from_rounding_goes_on(clouds):
    """However long the marginal error has not fallen."""
    points = weighted_points(clouds)
    noisy = Noisy([(points[1], points[2])], (32, 32))
    noisy.threshold = 1e-2
    terms = solve_cross_terms(noisy, 0.5, Converged(tolerance=1e-3, max_iterations=300))
    assert int(terms.iterations) == 300
    assert float(terms.rounding) < 1e-4


def count_work(monkeypatch):
    """Scores that softmins have read, by what holds them."""
    read = {"anchored": 0, "stored": 0}
    for name, module in (("anchored", anchored_segments), ("stored", stored_segments)):
        tiles = module.tiles

        def counting(size, *args, name=name, tiles=tiles):
            read[name] += size[0] * size[1] * size[2]
            return tiles(size, *args)

        monkeypatch.setattr(module, "tiles", counting)
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
            terms = solve_cross_terms(StoredSegments(chosen, (32, 32)), 0.1, options)
            work.append(read)
            iterations.append(terms.iterations.tolist())
    assert iterations[0] == [iterations[k][0] for k in (1, 2, 3)]
    assert min(iterations[0][1:]) > 5 * iterations[0][0]
    for name in ("anchored", "stored"):
        assert work[0][name] == sum(read[name] for read in work[1:])


@pytest.mark.parametrize("far", [1.0, 19.0, 200.0])
def test_anchors_follow_the_potentials(clouds, far):
    """However far those went since the anchor was taken, in units of epsilon."""
    points = weighted_points(clouds)
    epsilon = torch.tensor([0.1, 0.7], dtype=torch.float64)
    active = torch.ones(2, dtype=torch.bool)
    stored = StoredSegments([(points[3], points[1]), (points[1], points[2])], (48, 32))
    anchored = stored.coarse(1e-3)
    anchored.evaluate(epsilon, active)
    draw = torch.Generator().manual_seed(0)
    moved = torch.randn(stored.potentials[1].shape, generator=draw, dtype=torch.float64)
    stored.potentials[1] += far * epsilon[:, None] * moved.sign()
    found, f = anchored.evaluate(epsilon, active), stored.potentials[0].clone()
    expected = stored.evaluate(epsilon, active)
    error = ((f - stored.potentials[0]) / epsilon[:, None])[stored.masses[0] > 0]
    assert float(error.abs().max()) < 1e-6
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


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


def test_most_scores_are_multiplied_not_exponentiated(clouds, monkeypatch):
    read = count_work(monkeypatch)
    solve_in_float64(weighted_points(clouds), torch.tensor([[3, 1]]), 0.05, Converged())
    assert read["anchored"] > 4 * read["stored"] > 0


@pytest.mark.parametrize("iterations", [1, 5])
def test_iterations_are_limited(clouds, iterations):
    options = Converged(1e-10, iterations)
    points = weighted_points(clouds)
    for solve, sides in (
        (solve_cross_terms, [(points[1], points[2])]),
        (solve_self_terms, [(points[1], points[1])]),
    ):
        terms = solve(StoredSegments(sides, (32, 32)), 0.1, options)
        assert int(terms.iterations) == iterations


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 40])
def test_terms_are_those_of_the_iteration_that_was_enough(clouds, steps, monkeypatch):
    """To the last bit, however many more are launched before the host asks."""
    points = weighted_points(clouds)
    sides = [(points[i], points[j]) for i, j in all_pairs(4).tolist()]
    expected = solve_cross_terms(StoredSegments(sides, (48, 48)), 0.1, Converged())
    monkeypatch.setattr(StoredSegments, "repeat", lambda _, step: [step() for _ in range(steps)])
    found = solve_cross_terms(StoredSegments(sides, (48, 48)), 0.1, Converged())
    for name in ("iterations", "marginal_error", "value", "lower", "upper", "rounding"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_finished_segments_are_told_once(clouds):
    told = []
    points = weighted_points(clouds)
    sides = [(points[i], points[j]) for i, j in all_pairs(4).tolist()]
    solve_cross_terms(StoredSegments(sides, (48, 48)), 0.1, Converged(), told.append)
    assert sum(told) == 6
    assert min(told) > 0


@pytest.mark.slow
def test_tiles_smaller_than_one_problem_change_nothing(clouds, monkeypatch):
    points, pairs = weighted_points(clouds), all_pairs(4)
    expected = solve_in_float64(points, pairs, 0.1, Converged())
    monkeypatch.setattr(segment_tiles, "TILE_ELEMENTS_CPU", 100)
    found = solve_in_float64(points, pairs, 0.1, Converged())
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)
