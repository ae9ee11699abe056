"""Debiased entropic transport between the points of pairs of classes.

W_ij = OT_eps(i, j) - OT_eps(i, i) / 2 - OT_eps(j, j) / 2 with cost ||x - y||^2 (Feydy et al. 2019,
Interpolating between optimal transport and MMD using Sinkhorn divergences). Subtracting the self
terms OT_eps(i, i) puts a class at distance 0 from itself; each self term is solved once, however
many pairs its class is in. The self terms of all classes are solved side by side, and then all
pairs; `transport_terms` does both. A point has one potential for each class it is compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.errors import NotConvergedWarning
from otdd_flash.labels.classes import ClassCloud, merge_identical
from otdd_flash.labels.pair_chunks import used_classes
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.transport_terms import TermSolver
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.epsilon import epsilon_given_as

# Of classes and pairs that stopped early, so many are named.
SHOWN = 5
# Pairs of which lists are on a device at once, some 200 bytes each.
MOST_PAIRS = 1 << 24


def sinkhorn_distances(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    epsilon: float,
    tolerance: float = 1e-3,
    *,
    progress: Progress | None = None,
) -> PairDistances:
    """Debiased Sinkhorn divergences S_eps of pairs of classes.

    For the cost ||.||^2 they are not negative; a value that the tolerance leaves below zero is set
    to it. The value and the bounds of a pair follow from its two classes alone, to the last bit.

    Args:
        clouds: V classes.
        pairs: (P, 2) int64, indices of the classes of each pair.
        epsilon: regularisation, in units of ||.||^2.
        tolerance: L1 marginal error at which each solve stops.
        progress: called with the number of class pairs done and their total.

    Returns:
        P values with bounds that hold S_eps; all 0 between classes of equal content.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    if len(pairs) > MOST_PAIRS:
        parts = []
        for done in range(0, len(pairs), MOST_PAIRS):
            some, told = pairs[done : done + MOST_PAIRS], _after(progress, done, len(pairs))
            parts.append(sinkhorn_distances(clouds, some, epsilon, tolerance, progress=told))
        return PairDistances(*map(torch.cat, zip(*parts, strict=True)))
    options = Converged(tolerance=tolerance)
    device = clouds[0].points.device
    used, local = used_classes(clouds, pairs)
    classes, index = merge_identical(used)
    one, two = torch.tensor(index, dtype=torch.int64).to(device)[local].unbind(1)
    # Solved the other way round, a pair would have other last digits.
    ordered = torch.stack((torch.maximum(one, two), torch.minimum(one, two)), 1)
    different = torch.nonzero(one != two).squeeze(1)
    out = torch.zeros((3, len(pairs)), dtype=torch.float64, device=device)
    if len(different):
        finished = _counting(progress, len(pairs), len(pairs) - len(different))
        with epsilon_given_as("labels.epsilon", epsilon, epsilon):
            unlike = ordered[different]
            out[:, different] = _divergences(classes, unlike, epsilon, options, finished)
    values, lower, upper = out
    return PairDistances(values.clamp_min_(0), lower, upper)


def _divergences(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None,
) -> Tensor:
    """Value, lower and upper bound of every pair (3, P)."""
    solver = TermSolver(clouds, epsilon, options)
    own = solver.solve(torch.arange(len(clouds), device=pairs.device)[:, None].expand(-1, 2))
    cross = solver.solve(pairs, finished)
    _warn_of_late(clouds, own, (pairs, cross), options)
    first, second = ([numbers[side] for numbers in own[:3]] for side in pairs.unbind(1))
    halves = [(one + two) / 2 for one, two in zip(first, second, strict=True)]
    return torch.stack((cross.value - halves[0], cross.lower - halves[2], cross.upper - halves[1]))


def _after(progress: Progress | None, before: int, total: int) -> Progress | None:
    """For some of the pairs, of which so many others are done before."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _counting(progress: Progress | None, total: int, done: int) -> Finished | None:
    """From numbers of pairs that just finished to the number of all that have."""
    if progress is None:
        return None

    def finished(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return finished


def _warn_of_late(
    clouds: Sequence[ClassCloud],
    own: SegmentTerms,
    cross: tuple[Tensor, SegmentTerms],
    options: Converged,
) -> None:
    """Name the classes and pairs that stopped before the tolerance, and what stopped them."""
    pairs, count = cross[0], len(clouds)

    def name(place: int) -> str:
        if place < count:
            return clouds[place].name
        i, j = pairs[place - count].tolist()
        return f"{clouds[i].name} against {clouds[j].name}"

    error, rounding = (
        torch.cat((one, two))
        for one, two in (
            (own.marginal_error, cross[1].marginal_error),
            (own.rounding, cross[1].rounding),
        )
    )
    tolerance = options.asked_tolerance
    late, by_rounding = error > tolerance, 2 * rounding > tolerance
    for which, limit, largest in (
        (late & by_rounding, "as far as rounding allows in float64", float(rounding.max())),
        (late & ~by_rounding, f"after {options.max_iterations} iterations", 0.0),
    ):
        if bool(which.any()):
            # Names of all of millions of pairs would take longer than to solve these.
            places = torch.nonzero(which).squeeze(1)
            shown, more = [name(place) for place in places[:SHOWN].tolist()], len(places) - SHOWN
            message = f"labels=sinkhorn: not converged to {tolerance:g} {limit} for "
            message += ", ".join(shown) + (f" and {more} more" * (more > 0))
            if largest:
                message += f", whose marginal errors stay at up to {largest:.1e}"
            warnings.warn(
                f"{message}; the bounds still hold. Raise labels.epsilon",
                NotConvergedWarning,
                stacklevel=4,
            )
