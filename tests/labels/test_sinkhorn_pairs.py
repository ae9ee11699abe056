"""Debiased entropic transport between classes: limits, invariances, independent solvers."""

from __future__ import annotations

import random

import pytest
import torch
from sinkhorn_cases import make_clouds, table_of

from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.labels import sinkhorn_pairs
from otdd_flash.labels import sinkhorn_pairs as stored_terms
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.exact import exact_distances
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import SegmentTerms


@pytest.fixture
def clouds():
    return make_clouds((9, 14, 12, 5, 1))


def with_points(cloud, points):
    return ClassCloud(cloud.name, points, cloud.weights)


def test_the_order_of_a_pair_of_the_list_and_of_the_classes_does_not_matter(clouds):
    pairs = all_pairs(5)
    first = sinkhorn_distances(clouds, pairs, 2.0)
    order = torch.tensor(random.Random(0).sample(range(len(pairs)), len(pairs)))
    back = torch.tensor([4, 2, 0, 1, 3])
    moved = [clouds[k] for k in back.argsort().tolist()]
    second = sinkhorn_distances(moved, back[pairs[order]].flip(1), 2.0)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one[order], two)


@pytest.mark.slow
def test_a_pair_does_not_depend_on_the_others_to_the_last_bit():
    """Whatever is solved beside it, in groups of any size and on any number of threads."""
    clouds = make_clouds((1, 2, 16, 17, 40, 65, 130), dim=7, weighted=True)
    pairs = all_pairs(7)
    threads = torch.get_num_threads()
    draw = random.Random(1)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            together = sinkhorn_distances(clouds, pairs, 0.3)
            for size in (1, 2, 9):
                chosen = torch.tensor(draw.sample(range(len(pairs)), size))
                apart = sinkhorn_distances(clouds, pairs[chosen], 0.3)
                for one, two in zip(together, apart, strict=True):
                    assert torch.equal(one[chosen], two)
    finally:
        torch.set_num_threads(threads)


def test_classes_of_equal_content_are_at_zero(clouds, solved):
    """In any order of their points and in any precision; nothing is prepared or solved for them."""
    twins, told = [with_points(cloud, cloud.points.flip(0)) for cloud in clouds], []
    pairs = torch.tensor([[0, 5], [6, 1], [2, 2]])
    found = sinkhorn_distances([*clouds, *twins], pairs, 0.3, progress=lambda *n: told.append(n))
    assert solved == ([], [])
    assert told == [(3, 3)]
    assert not torch.stack(list(found)).any()
    found = sinkhorn_distances([*clouds, *twins], torch.tensor([[6, 1], [6, 0], [1, 0]]), 2.0)
    for part in found:
        assert float(part[0]) == 0
        assert part[1] == part[2]


def test_small_epsilon_is_exact_and_large_epsilon_is_means(clouds):
    clouds, pairs = clouds[:3], all_pairs(3)
    exact = exact_distances(clouds, pairs).values
    small = sinkhorn_distances(clouds, pairs, 0.003, 1e-4).values
    torch.testing.assert_close(small, exact, rtol=0.01, atol=0.01)
    means = torch.stack([cloud.points.mean(0) for cloud in clouds])
    apart = (means[pairs[:, 0]] - means[pairs[:, 1]]).square().sum(1)
    large = sinkhorn_distances(clouds, pairs, 1e6).values
    torch.testing.assert_close(large, apart, rtol=1e-3, atol=1e-3)


def test_moving_turning_scaling_and_shuffling(clouds):
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(3)))
    moved = [
        with_points(cloud, (3 * cloud.points @ turn.double() + 700).flip(0)) for cloud in clouds
    ]
    expected = 9 * table_of(clouds, 4.0, 1e-8)
    torch.testing.assert_close(table_of(moved, 9 * 4.0, 1e-8), expected, rtol=1e-6, atol=1e-8)


def test_whole_weights_count_as_repetitions(clouds):
    repeats = torch.arange(len(clouds[1])) % 3 + 1
    weighted = ClassCloud("weighted", clouds[1].points, repeats / repeats.sum().double())
    repeated = with_points(clouds[1], torch.repeat_interleave(clouds[1].points, repeats, 0))
    torch.testing.assert_close(
        table_of([weighted, clouds[0], clouds[4]], 5.0, 1e-8),
        table_of([repeated, clouds[0], clouds[4]], 5.0, 1e-8),
        rtol=1e-6,
        atol=1e-8,
    )


def test_the_inner_sinkhorn_is_not_debiased_so_a_dataset_differs_from_itself(clouds):
    """Every sample twice is the same measure; without self terms it is far from itself."""
    twice = with_points(clouds[0], clouds[0].points.repeat(2, 1))
    found = sinkhorn_distances([clouds[0], twice], all_pairs(2), 1.0, 1e-6)
    assert float(found.values) < 1e-6
    assert float(found.lower) <= 0 <= float(found.upper)


def test_single_precision_classes_far_from_the_origin():
    """Differences, not coordinates, decide: 1e4 from the origin at scale 1."""
    clouds = make_clouds((20, 30), dim=5)
    far = [with_points(cloud, (cloud.points.float() + 1e4)) for cloud in clouds]
    near = [with_points(cloud, cloud.points.double() - 1e4) for cloud in far]
    torch.testing.assert_close(table_of(far, 2.0), table_of(near, 2.0), rtol=1e-9, atol=0)


def test_self_terms_are_solved_once_per_distinct_class(clouds, monkeypatch):
    solved = []
    solve = stored_terms.solve_self_terms

    def counting(segments, *args):
        solved.extend(int((masses > 0).sum()) for masses in segments.masses[0])
        return solve(segments, *args)

    monkeypatch.setattr(stored_terms, "solve_self_terms", counting)
    twin = with_points(clouds[0], clouds[0].points.flip(0))
    sinkhorn_distances([*clouds, twin], all_pairs(6), 1.0)
    assert sorted(solved) == [1, 5, 9, 12, 14]


def late_of(pairs, rounding):
    return sinkhorn_pairs._Late(torch.tensor(pairs), torch.tensor(rounding, dtype=torch.float64))


@pytest.mark.parametrize("late", [5, 6])
def test_what_is_late_is_named_with_what_stopped_it(late, clouds):
    """Five of those that iterations stopped, and no size of their errors; one by rounding."""
    first = [0] * (late == 6)
    own = late_of([[k, k] for k in (*first, 1, 4)], [*(0.0 for _ in first), 0.25, 4e-4])
    cross = late_of([[1, 0], [2, 0], [3, 0], [4, 0]], [0.0, 0.0, 5e-4, 0.0])
    with pytest.warns(NotConvergedWarning) as caught:
        sinkhorn_pairs._warn_of_late(clouds, [own, cross], Converged(1e-3, 7))
    by_rounding, by_iterations = (str(warning.message) for warning in caught)
    assert by_rounding == (
        "labels=sinkhorn: not converged to 0.001 as far as rounding allows in float64 for class 1, "
        "whose marginal errors stay at up to 2.5e-01; the solver bounds still hold. "
        "Raise labels.epsilon"
    )
    names = ["class 0"] * (late == 6) + ["class 4"]
    names += [f"class {k} against class 0" for k in (1, 2, 3, 4)]
    assert by_iterations == (
        "labels=sinkhorn: not converged to 0.001 after 7 iterations for "
        + ", ".join(names[:5])
        + " and 1 more" * (late == 6)
        + "; the solver bounds still hold. Raise labels.epsilon"
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("error", "named"), [(1e-3, []), (2e-3, [[[1, 1]], [[3, 1]]])])
def test_what_is_late_is_above_the_tolerance(error, named, clouds, monkeypatch):
    """One class and one pair, or none."""

    def solve(solver, pairs, finished=None):
        terms = SegmentTerms(*torch.zeros(6, len(pairs), dtype=torch.float64))
        terms.marginal_error[1] = error
        terms.rounding[:] = torch.arange(len(pairs)) / 8
        return terms

    monkeypatch.setattr(sinkhorn_pairs.TermSolver, "solve", solve)
    divergences = sinkhorn_pairs._Divergences(clouds, 1.0, Converged(1e-3, 7))
    divergences.between(torch.tensor([[1, 0], [3, 1]]), None)
    late = [part for part in divergences.late if len(part.pairs)]
    assert [part.pairs.tolist() for part in late] == named
    assert [part.rounding.tolist() for part in late] == [[0.125]] * len(named)
    if not named:
        sinkhorn_pairs._warn_of_late(clouds, divergences.late, Converged(1e-3, 7))


@pytest.mark.slow
def test_a_pair_too_large_to_store_is_streamed(clouds, monkeypatch):
    expected = sinkhorn_distances(clouds, all_pairs(5), 5.0, 1e-7)
    monkeypatch.setattr(stored_terms, "MOST_STORED", 200)
    found = sinkhorn_distances(clouds, all_pairs(5), 5.0, 1e-7)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-7, atol=1e-9)
    assert not torch.equal(found.values, expected.values)


def test_a_tolerance_below_rounding_is_refused(clouds):
    with pytest.raises(InputError, match=r"epsilon=1e-13 is too small for float64.*raise"):
        sinkhorn_distances(clouds, all_pairs(5), 1e-13)


def test_progress_counts_pairs(clouds):
    told = []
    twin = with_points(clouds[0], clouds[0].points.flip(0))
    sinkhorn_distances(
        [*clouds, twin], all_pairs(6), 0.1, progress=lambda done, total: told.append((done, total))
    )
    assert [total for _, total in told] == [15] * len(told)
    assert told == sorted(set(told))
    assert told[-1] == (15, 15)


@pytest.fixture
def solved(monkeypatch):
    """The numbers of pairs of every solve, and of classes whenever some were prepared."""
    lengths, prepared = [], []
    prepare, solve = sinkhorn_pairs.TermSolver.__init__, sinkhorn_pairs.TermSolver.solve

    def preparing(self, clouds, *others):
        prepared.append(len(clouds))
        prepare(self, clouds, *others)

    def solving(self, pairs, *others):
        lengths.append(len(pairs))
        return solve(self, pairs, *others)

    monkeypatch.setattr(sinkhorn_pairs.TermSolver, "__init__", preparing)
    monkeypatch.setattr(sinkhorn_pairs.TermSolver, "solve", solving)
    return lengths, prepared


def test_long_lists_are_solved_in_parts(clouds, monkeypatch, solved):
    """Of classes that are prepared once; the numbers and what is told are those of one list."""
    lengths, prepared = solved
    twin = with_points(clouds[1], clouds[1].points.flip(0))
    # Of three equal pairs a part has nothing to solve.
    pairs = torch.cat((all_pairs(5), torch.tensor([[5, 1], [2, 2], [1, 5], [4, 5]])))
    found, told = [], []
    for most in (len(pairs), 2):
        monkeypatch.setattr(sinkhorn_pairs, "MOST_PAIRS", most)
        counts = []
        found.append(
            sinkhorn_distances(
                [*clouds, twin], pairs, 3.0, progress=lambda *done, to=counts: to.append(done)
            )
        )
        told.append(counts)
    assert lengths == [5, 11, 5, 2, 2, 2, 2, 2, 1]
    assert prepared == [5, 5]
    assert all(map(torch.equal, *found))
    for counts in told:
        assert counts == sorted(set(counts))
        assert counts[-1] == (14, 14)


def test_what_is_late_in_a_long_list_is_said_once(clouds, monkeypatch):
    options, said = sinkhorn_pairs.Converged, []
    monkeypatch.setattr(
        sinkhorn_pairs,
        "Converged",
        lambda tolerance: options(tolerance=tolerance, max_iterations=2),
    )
    for most in (10, 3):
        monkeypatch.setattr(sinkhorn_pairs, "MOST_PAIRS", most)
        with pytest.warns(
            NotConvergedWarning, match=r"after 2 iterations for class .* more"
        ) as caught:
            found = sinkhorn_distances(clouds, all_pairs(5), 0.01)
        assert bool((found.lower <= found.upper).all())
        said.append([(str(warning.message), warning.filename) for warning in caught])
    assert said[0] == said[1]
    assert [place for _, place in said[0]] == [__file__]
