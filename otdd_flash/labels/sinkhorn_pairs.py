"""Debiased entropic transport between the points of pairs of classes.

W_ij = OT_eps(i, j) - OT_eps(i, i) / 2 - OT_eps(j, j) / 2 with cost ||x - y||^2 (Feydy et al. 2019,
Interpolating between optimal transport and MMD using Sinkhorn divergences). Subtracting the self
terms OT_eps(i, i) puts a class at distance 0 from itself; each self term is solved once, however
many pairs its class is in. The self terms of all classes are solved side by side, and then all
pairs; `transport_terms` does both. A point has one potential for each class it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.errors import NotConvergedWarning, warn
from otdd_flash.labels.classes import ClassCloud, merge_identical
from otdd_flash.labels.pair_chunks import named_classes
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.transport_terms import TermSolver
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.epsilon import epsilon_given_as

# Of classes and pairs that stopped early, so many are named.
SHOWN = 5
# Pairs that are solved at once: what is made of their list takes some 200 bytes each.
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
    options = Converged(tolerance=tolerance)
    pairs = pairs.to(clouds[0].points.device)
    out = torch.zeros((3, len(pairs)), dtype=torch.float64, device=pairs.device)
    if not len(pairs):
        return PairDistances(*out)
    used, places = named_classes(clouds, pairs)
    classes, index = merge_identical(used)
    places = torch.tensor(index, dtype=torch.int64).to(pairs.device)[places]
    divergences: _Divergences | None = None
    finished = _counting(progress, len(pairs))
    parts = torch.split(pairs, MOST_PAIRS), torch.split(out, MOST_PAIRS, 1)
    for some, found in zip(*parts, strict=True):
        different, unlike = _different(places, some)
        if finished is not None and len(different) < len(some):
            finished(len(some) - len(different))
        if not len(different):
            continue
        with epsilon_given_as("labels.epsilon", epsilon, epsilon):
            divergences = divergences or _Divergences(classes, epsilon, options)
            found[:, different] = divergences.between(unlike, finished)
    if divergences is not None:
        _warn_of_late(classes, divergences.late, options)
    values, lower, upper = out
    return PairDistances(values.clamp_min_(0), lower, upper)


def _different(places: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs (P, 2) are of two places (V,), the positions (Q,), and their places (Q, 2)."""
    one, two = places[pairs].unbind(1)
    different = torch.nonzero(one != two).squeeze(1)
    # Solved the other way round, a pair would have other last digits.
    ordered = torch.stack((torch.maximum(one, two), torch.minimum(one, two)), 1)
    return different, ordered[different]


class _Late(NamedTuple):
    """Terms that stopped before the tolerance: their classes (L, 2), and `rounding` (L,)."""

    pairs: Tensor
    rounding: Tensor


class _Divergences:
    """Debiased divergences between V classes, whose self terms are solved at once.

    Attributes:
        late: which of all terms stopped before the tolerance, as they were solved.
    """

    def __init__(self, clouds: Sequence[ClassCloud], epsilon: float, options: Converged) -> None:
        self._solver = TermSolver(clouds, epsilon, options)
        self._tolerance = options.asked_tolerance
        self.late: list[_Late] = []
        index = torch.arange(len(clouds), device=clouds[0].points.device)
        self._own = self._solved(index[:, None].expand(-1, 2), None)

    def between(self, pairs: Tensor, finished: Finished | None) -> Tensor:
        """Value, lower and upper bound (3, P) of pairs (P, 2) of different classes."""
        cross = self._solved(pairs, finished)
        ends = (numbers[pairs].unbind(1) for numbers in self._own[:3])
        value, lower, upper = ((one + two) / 2 for one, two in ends)
        return torch.stack((cross.value - value, cross.lower - upper, cross.upper - lower))

    def _solved(self, pairs: Tensor, finished: Finished | None) -> SegmentTerms:
        terms = self._solver.solve(pairs, finished)
        late = terms.marginal_error > self._tolerance
        self.late.append(_Late(pairs[late], terms.rounding[late]))
        return terms


def _counting(progress: Progress | None, total: int) -> Finished | None:
    """Add up the numbers of pairs that just finished, for `progress`; None without one."""
    if progress is None:
        return None
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return finished


def _warn_of_late(clouds: Sequence[ClassCloud], late: Sequence[_Late], options: Converged) -> None:
    """Name the classes and pairs that stopped before the tolerance, and what stopped them."""
    pairs, rounding = (torch.cat(parts) for parts in zip(*late, strict=True))
    tolerance = options.asked_tolerance
    by_rounding = 2 * rounding > tolerance
    for which, limit in (
        (by_rounding, "as far as rounding allows in float64"),
        (~by_rounding, f"after {options.max_iterations} iterations"),
    ):
        if bool(which.any()):
            # Names of all of millions of pairs would take longer than to solve these.
            named = pairs[which]
            shown, more = (
                [_name(clouds, *ends) for ends in named[:SHOWN].tolist()],
                len(named) - SHOWN,
            )
            message = f"labels=sinkhorn: not converged to {tolerance:g} {limit} for "
            message += ", ".join(shown) + (f" and {more} more" * (more > 0))
            if which is by_rounding:
                largest = float(rounding[which].max())
                message += f", whose marginal errors stay at up to {largest:.1e}"
            warn(
                f"{message}; the solver bounds still hold. Raise labels.epsilon",
                NotConvergedWarning,
            )


def _name(clouds: Sequence[ClassCloud], i: int, j: int) -> str:
    """Name the term between two classes in messages."""
    return clouds[i].name if i == j else f"{clouds[i].name} against {clouds[j].name}"
