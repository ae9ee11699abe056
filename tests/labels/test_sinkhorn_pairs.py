"""Debiased transport between classes: no effect of the list, and where terms are solved."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace

import live_bytes
import operation_counts
import pytest
import torch
from sinkhorn_cases import make_clouds, table_of
from spying import calls_of

from otdd_flash.engine.problems import SegmentTerms
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.kernels.segments.step import SMALL
from otdd_flash.labels import sinkhorn_pairs
from otdd_flash.labels.pairs import ClassCloud, all_pairs
from otdd_flash.labels.sinkhorn_pairs import TermSolver, kernels_run_on, sinkhorn_distances
from otdd_flash.operators.kernel_segments import bytes_of
from otdd_flash.solver.schedules import Converged


@pytest.fixture
def clouds():
    return make_clouds((9, 14, 12, 5, 1))


def with_points(cloud, points):
    return ClassCloud(cloud.name, points, cloud.weights)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_a_pair_does_not_depend_on_the_others_to_the_last_bit(threads):
    """Whatever is solved beside it, in any order of the list, of the classes and of the two."""
    clouds = make_clouds((1, 2, 16, 17, 65), dim=7, weighted=True)
    pairs, before = all_pairs(5), torch.get_num_threads()
    back = torch.tensor([4, 2, 0, 1, 3])
    reordered = [clouds[k] for k in back.argsort().tolist()]
    torch.set_num_threads(threads)
    try:
        together = sinkhorn_distances(clouds, pairs, 0.3)
        for chosen in (torch.randperm(10, generator=torch.manual_seed(1)), torch.tensor([7])):
            apart = sinkhorn_distances(reordered, back[pairs[chosen]].flip(1), 0.3)
            for one, two in zip(together, apart, strict=True):
                assert torch.equal(one[chosen], two)
    finally:
        torch.set_num_threads(before)


def test_classes_of_equal_content_are_at_zero(clouds):
    """In any order of their points and in any precision."""
    twins, told = [with_points(cloud, cloud.points.flip(0)) for cloud in clouds], []
    pairs = torch.tensor([[0, 5], [6, 1], [2, 2]])
    found = sinkhorn_distances([*clouds, *twins], pairs, 0.3, progress=lambda *n: told.append(n))
    assert told == [(3, 3)]
    assert not torch.stack(list(found)).any()
    found = sinkhorn_distances([*clouds, *twins], torch.tensor([[6, 1], [6, 0], [1, 0]]), 2.0)
    for part in found:
        assert float(part[0]) == 0
        assert part[1] == part[2]


def test_single_precision_classes_far_from_the_origin():
    """Differences, not coordinates, decide: 1e4 from the origin at scale 1."""
    clouds = make_clouds((20, 30), dim=5)
    far = [with_points(cloud, (cloud.points.float() + 1e4)) for cloud in clouds]
    near = [with_points(cloud, cloud.points.double() - 1e4) for cloud in far]
    torch.testing.assert_close(table_of(far, 2.0), table_of(near, 2.0), rtol=1e-9, atol=0)


def test_what_is_late_is_named_with_what_stopped_it(clouds):
    """Five of those that iterations stopped, and no size of their errors; one by rounding."""
    own, cross = (
        (torch.tensor(pairs), torch.tensor(rounding, dtype=torch.float64))
        for pairs, rounding in (
            ([[0, 0], [1, 1], [4, 4]], [0.0, 0.25, 4e-4]),
            ([[1, 0], [2, 0], [3, 0], [4, 0]], [0.0, 0.0, 5e-4, 0.0]),
        )
    )
    with pytest.warns(NotConvergedWarning) as caught:
        sinkhorn_pairs._warn_of_late(clouds, [own, cross], Converged(1e-3, 7))
    by_rounding, by_iterations = (str(warning.message) for warning in caught)
    assert by_rounding == (
        "labels=sinkhorn: not converged to 0.001 as far as rounding allows in float64 for class 1, "
        "whose marginal errors stay at up to 2.5e-01; the solver bounds still hold. "
        "Raise labels.epsilon"
    )
    assert by_iterations == (
        "labels=sinkhorn: not converged to 0.001 after 7 iterations for class 0, class 4, class 1 "
        "against class 0, class 2 against class 0, class 3 against class 0 and 1 more; the solver "
        "bounds still hold. Raise labels.epsilon"
    )


@pytest.mark.slow
def test_a_pair_too_large_to_store_is_streamed(clouds, monkeypatch):
    expected = sinkhorn_distances(clouds, all_pairs(5), 5.0, 1e-7)
    monkeypatch.setattr(sinkhorn_pairs, "MOST_STORED", 200)
    found = sinkhorn_distances(clouds, all_pairs(5), 5.0, 1e-7)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-7, atol=1e-9)
    assert not torch.equal(found.values, expected.values)


def test_a_tolerance_below_rounding_is_refused(clouds):
    with pytest.raises(InputError, match=r"epsilon=1e-13 is too small for float64.*raise"):
        sinkhorn_distances(clouds, all_pairs(5), 1e-13)


def test_long_lists_are_solved_in_parts(clouds, monkeypatch):
    """Self terms are solved once; the numbers and what is told are those of one list."""
    solves = calls_of(monkeypatch, TermSolver, "solve")
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
    assert [len(some) for _, some, *_ in solves] == [5, 11, 5, 2, 2, 2, 2, 2, 1]
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


# Where terms are solved, and in which batches.

PAIRS = torch.tensor([[1, 0], [2, 0], [2, 1]])


def solver():
    return TermSolver(make_clouds((3, 2, 4)), 1.0, Converged(1e-2))


@pytest.mark.parametrize("out_of_reach", [False, True])
def test_kernels_solve_what_they_can_and_float64_the_rest(out_of_reach, monkeypatch):
    asked = []

    def solve(pool, pairs, epsilon, options, finished):
        """The last pair's error is rounding where kernels cannot reach the tolerance."""
        asked.append((len(pool.sizes), pairs.tolist(), epsilon, options))
        terms = SegmentTerms(*torch.zeros(6, len(pairs), dtype=torch.float64))
        if out_of_reach:
            terms.marginal_error[-1] = terms.rounding[-1] = 0.5
        return terms

    monkeypatch.setattr(sinkhorn_pairs, "kernels_run_on", lambda _: True)
    monkeypatch.setattr(sinkhorn_pairs, "solve_in_kernels", solve)
    found = solver().solve(PAIRS)
    assert asked == [(3, PAIRS.tolist(), 1.0, Converged(1e-2))]
    monkeypatch.setattr(sinkhorn_pairs, "kernels_run_on", lambda _: False)
    in_float64 = solver().solve(PAIRS)
    assert len(asked) == 1
    assert bool((in_float64.value > 0).all())
    assert found.value[:2].tolist() == [0, 0]
    assert float(found.value[2]) == (float(in_float64.value[2]) if out_of_reach else 0)


def test_operations_before_the_first_solve_do_not_grow_with_classes(monkeypatch):
    """A GPU is asked for the masses of all classes at once, as for all else."""
    monkeypatch.setattr(sinkhorn_pairs, "kernels_run_on", lambda _: True)
    counts, found = operation_counts.OperationCounts(monkeypatch), []
    for size in (4, 400):
        clouds = make_clouds((5,) * size)
        before = counts.operations
        with counts:
            TermSolver(clouds, 1.0, Converged(1e-2))
        found.append(counts.operations - before)
    assert found[0] == found[1]


def test_kernels_run_on_cards_that_have_triton(monkeypatch):
    def check(device):
        if device.index == 1:
            raise InputError("no Triton")

    monkeypatch.setattr(sinkhorn_pairs, "check_triton", check)
    found = [kernels_run_on(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1")]
    assert found == [False, True, False]


@pytest.mark.parametrize(
    ("errors", "rounding", "refused"),
    [
        pytest.param([0.009], [0.008], False, id="converged"),
        pytest.param([0.5], [0.004], False, id="late"),
        pytest.param([0.5, 0.5], [0.006, 0.2], True, id="rounding alone"),
        pytest.param([0.5], [0.5], False, id="stalled"),
        pytest.param([2.0], [2.0], True, id="nothing left"),
    ],
)
def test_what_rounding_alone_keeps_from_the_tolerance_is_refused(
    errors, rounding, refused, monkeypatch
):
    """One term of three is enough; of a stalled one nobody knows what rounding has of it."""

    def solve(_, pairs, *rest):
        terms = torch.zeros(6, len(pairs), dtype=torch.float64)
        terms[3, : len(errors)], terms[4, : len(errors)] = map(torch.tensor, (errors, rounding))
        return SegmentTerms(*terms)

    monkeypatch.setattr(sinkhorn_pairs, "kernels_run_on", lambda _: False)
    monkeypatch.setattr(sinkhorn_pairs, "solve_in_float64", solve)
    # Twice the largest rounding is named.
    refusal = pytest.raises(InputError, match=re.escape(f"{2 * max(rounding):.1e}"))
    with refusal if refused else nullcontext():
        solver().solve(PAIRS)


MANY = all_pairs(300)


@pytest.mark.parametrize("at_once", [1000, 1 << 20])
def test_batches_fill_half_of_the_memory(at_once, monkeypatch):
    """All pairs, each once and in their order, those of small classes apart."""
    sizes = torch.randint(1, 2 * SMALL, (300,), generator=torch.Generator().manual_seed(0))
    pool = SimpleNamespace(sizes=sizes, starts=sizes)
    free = 50_000_000
    monkeypatch.setattr(sinkhorn_pairs, "AT_ONCE", at_once)
    monkeypatch.setattr(sinkhorn_pairs, "free_memory", lambda _: free)
    batches = sinkhorn_pairs._batches(pool, MANY)
    sizes, needed = pool.sizes[MANY], bytes_of(pool.sizes[MANY])
    small = sizes.amax(1) <= SMALL
    for kind in (True, False):
        chosen = [members for is_small, members in batches if is_small == kind]
        assert torch.equal(torch.cat(chosen), torch.nonzero(small == kind).squeeze(1))
        taken = [int(needed[members].sum()) for members in chosen]
        # A pair that two would share is of the second.
        assert max(taken) <= free // 2 + int(needed.max())
        assert min(taken[:-1]) >= free // 2 - int(needed.max())
        assert len(taken) > 2
    # What is made of the list takes few bytes of a pair.
    monkeypatch.setattr(sinkhorn_pairs, "free_memory", lambda _: 1 << 40)
    monkeypatch.setattr(sinkhorn_pairs, "AT_ONCE", 1000)
    device = torch.device("cpu")
    assert live_bytes.peak(lambda: sinkhorn_pairs._batches(pool, MANY), device) < 30 * len(MANY)
    batches = sinkhorn_pairs._batches(pool, MANY)
    assert sum(members.untyped_storage().nbytes() for _, members in batches) == 8 * len(MANY)
