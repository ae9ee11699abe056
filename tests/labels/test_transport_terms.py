"""Where the terms between classes are solved, in which batches and groups of one shape."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import live_bytes
import operation_counts
import pytest
import torch
from sinkhorn_cases import make_clouds

from otdd_flash.errors import InputError
from otdd_flash.kernels.segments.step import SMALL
from otdd_flash.labels import kernel_terms
from otdd_flash.labels import sinkhorn_pairs as stored_terms
from otdd_flash.labels import sinkhorn_pairs as transport_terms
from otdd_flash.labels.classes import masses_of
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import TermSolver, _groups, kernels_run_on, padded_size
from otdd_flash.operators.kernel_segments import bytes_of
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import SegmentTerms

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

    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: True)
    monkeypatch.setattr(kernel_terms, "solve_in_kernels", solve)
    found = solver().solve(PAIRS)
    assert asked == [(3, PAIRS.tolist(), 1.0, Converged(1e-2))]
    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: False)
    in_float64 = solver().solve(PAIRS)
    assert len(asked) == 1
    assert bool((in_float64.value > 0).all())
    assert found.value[:2].tolist() == [0, 0]
    assert float(found.value[2]) == (float(in_float64.value[2]) if out_of_reach else 0)


def test_masses_are_those_of_every_class():
    clouds = make_clouds((3, 1, 7, 49, 2), weighted=True)
    for found, cloud in zip(masses_of(clouds), clouds, strict=True):
        assert torch.equal(found, cloud.masses)
    assert [cloud.weights is None for cloud in clouds] == [False, True, False, True, False]


def test_operations_before_the_first_solve_do_not_grow_with_classes(monkeypatch):
    """A GPU is asked for the masses of all classes at once, as for all else."""
    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: True)
    counts, found = operation_counts.OperationCounts(monkeypatch), []
    for size in (4, 400):
        clouds = make_clouds((5,) * size)
        before = counts.operations
        with counts:
            TermSolver(clouds, 1.0, Converged(1e-2))
        found.append(counts.operations - before)
    assert found[0] == found[1]


def test_float64_is_given_the_classes_of_its_pairs_alone(monkeypatch):
    """Of thousands, few pairs are left to it."""
    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: False)
    given = []
    solve = transport_terms.solve_in_float64

    def seen(classes, pairs, *rest):
        given.append(([len(cloud.points) for cloud in classes], pairs.tolist()))
        return solve(classes, pairs, *rest)

    monkeypatch.setattr(transport_terms, "solve_in_float64", seen)
    own, cross = solver().solve(torch.tensor([[1, 1]])), solver().solve(PAIRS[2:])
    assert given == [([2], [[0, 0]]), ([2, 4], [[1, 0]])]
    assert torch.equal(own.value, solver().solve(torch.arange(3)[:, None].expand(3, 2)).value[1:2])
    assert torch.equal(cross.value, solver().solve(PAIRS).value[2:])


@pytest.mark.parametrize(
    ("device", "refused", "expected"),
    [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)],
)
def test_kernels_run_on_cards_that_have_triton(device, refused, expected, monkeypatch):
    def check(_):
        if refused:
            raise InputError("no Triton")

    monkeypatch.setattr(transport_terms, "check_triton", check)
    assert kernels_run_on(torch.device(device)) is expected


def refused_at(errors, rounding, monkeypatch):
    """Whether terms with these errors are refused in float64, at a tolerance of 0.01."""

    def solve(_, pairs, *rest):
        terms = torch.zeros(6, len(pairs), dtype=torch.float64)
        terms[3, : len(errors)], terms[4, : len(errors)] = map(torch.tensor, (errors, rounding))
        return SegmentTerms(*terms)

    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: False)
    monkeypatch.setattr(transport_terms, "solve_in_float64", solve)
    try:
        solver().solve(PAIRS)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("error", "rounding", "refused"),
    [
        pytest.param(0.009, 0.008, False, id="converged"),
        pytest.param(0.5, 0.004, False, id="late"),
        pytest.param(0.5, 0.006, True, id="rounding alone"),
        pytest.param(0.5, 0.5, False, id="stalled"),
        pytest.param(2.0, 2.0, True, id="nothing left"),
    ],
)
def test_what_rounding_alone_keeps_from_the_tolerance_is_refused(
    error, rounding, refused, monkeypatch
):
    """One term of three is enough; of a stalled one nobody knows what rounding has of it."""
    assert bool(refused_at([error], [rounding], monkeypatch)) is refused


def test_the_largest_rounding_is_said(monkeypatch):
    assert "4.0e-01" in refused_at([0.5, 0.5], [0.006, 0.2], monkeypatch)


MANY = all_pairs(300)


@pytest.fixture
def pool():
    sizes = torch.randint(1, 2 * SMALL, (300,), generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(sizes=sizes, starts=sizes)


@pytest.mark.parametrize("at_once", [1000, 1 << 20])
def test_batches_fill_half_of_the_memory(pool, at_once, monkeypatch):
    """All pairs, each once and in their order, those of small classes apart."""
    free = 50_000_000
    monkeypatch.setattr(kernel_terms, "AT_ONCE", at_once)
    monkeypatch.setattr(kernel_terms, "free_memory", lambda _: free)
    batches = kernel_terms._batches(pool, MANY)
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


def test_what_is_made_of_a_list_takes_few_bytes_of_a_pair(pool, monkeypatch):
    monkeypatch.setattr(kernel_terms, "AT_ONCE", 1000)
    monkeypatch.setattr(kernel_terms, "free_memory", lambda _: 1 << 40)
    run = lambda: kernel_terms._batches(pool, MANY)  # noqa: E731
    assert live_bytes.peak(run, torch.device("cpu")) < 30 * len(MANY)
    kept = sum(members.untyped_storage().nbytes() for _, members in run())
    assert kept == 8 * len(MANY)


@pytest.mark.parametrize("most", [10**8, 255])
def test_every_pair_is_in_one_group_of_its_shape(most, monkeypatch):
    """As many together as `GROUP` costs are, and one that is too large to store alone."""
    monkeypatch.setattr(stored_terms, "GROUP", 3 * 256)
    monkeypatch.setattr(stored_terms, "MOST_STORED", most)
    sizes = [3, 16, 17, 5, 9]
    pairs = list(itertools.combinations(range(5), 2))
    groups = list(_groups(sizes, pairs))
    assert sorted(itertools.chain(*(members for _, members in groups))) == list(range(10))
    for shape, members in groups:
        assert {tuple(padded_size(sizes[k]) for k in pairs[p]) for p in members} == {shape}
    # Six pairs of (16, 16); of (16, 32) and (32, 16) one fits.
    assert sorted(len(members) for _, members in groups) == (
        [1] * 4 + [3, 3] if most > 255 else [1] * 10
    )
