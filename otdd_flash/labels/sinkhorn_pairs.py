"""Debiased entropic transport between the points of all class pairs.

W_ij = OT_eps(i, j) - OT_eps(i, i) / 2 - OT_eps(j, j) / 2 with cost ||x - y||^2 (Feydy et al. 2019,
Interpolating between optimal transport and MMD using Sinkhorn divergences). The self terms make a
class zero away from itself; each is solved once. Everything is solved in float64: W_ij is a
difference of values that are much larger than itself where classes overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import Progress
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver.alternating import solve_alternating
from otdd_flash.solver.options import SolverOptions
from otdd_flash.solver.symmetric import solve_symmetric
from otdd_flash.solver.term import TransportTerm

# The scores of one pair are kept, with scratch space of their size: 3 GiB at this many.
MAX_PAIRS_OF_POINTS = 100_000_000


def sinkhorn_distances(
    clouds: Sequence[ClassCloud],
    epsilon: float,
    tolerance: float = 1e-3,
    *,
    progress: Progress | None = None,
) -> Tensor:
    """Table of debiased Sinkhorn divergences S_eps.

    For the cost ||.||^2 they are not negative; what the tolerance leaves below zero is set to it.

    Args:
        clouds: V classes.
        epsilon: regularisation, in units of ||.||^2.
        tolerance: L1 marginal error at which each solve stops.
        progress: called with the number of class pairs done and their total.

    Returns:
        (V, V) float64 on the CPU, symmetric, with a zero diagonal.

    Raises:
        InputError: two classes are too large.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    _check_sizes(clouds)
    options = SolverOptions(tolerance=tolerance)
    self_terms = [
        solve_symmetric(_operator(cloud, cloud), epsilon, options, name=cloud.name)
        for cloud in clouds
    ]
    late = [
        cloud.name for cloud, term in zip(clouds, self_terms, strict=True) if not term.converged
    ]
    count = len(clouds)
    table = torch.zeros(count, count, dtype=torch.float64)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    for done, (i, j) in enumerate(pairs, 1):
        cross = solve_alternating(_operator(clouds[i], clouds[j]), epsilon, options)
        table[i, j] = table[j, i] = _debiased(cross, self_terms[i], self_terms[j])
        if not cross.converged:
            late.append(f"{clouds[i].name} against {clouds[j].name}")
        if progress is not None:
            progress(done, len(pairs))
    if late:
        _warn_not_converged(late, options)
    return table.clamp_min_(0)


def _operator(one: ClassCloud, two: ClassCloud) -> StoredOperator:
    points_one, points_two = (cloud.points.detach().to(torch.float64) for cloud in (one, two))
    # Differences, not products: no cancellation, and a class is at exactly 0 from itself.
    distances = torch.cdist(points_one, points_two, compute_mode="donot_use_mm_for_euclid_dist")
    return StoredOperator.from_cost(distances.square_(), one.masses, two.masses)


def _debiased(cross: TransportTerm, first: TransportTerm, second: TransportTerm) -> float:
    return cross.value - (first.value + second.value) / 2


def _check_sizes(clouds: Sequence[ClassCloud]) -> None:
    largest = max(clouds, key=len)
    if len(largest) ** 2 > MAX_PAIRS_OF_POINTS:
        raise InputError(
            f"labels=sinkhorn keeps the costs between all points of two classes, and class "
            f"{largest.name} has {len(largest):,} samples, more than the "
            f"{int(MAX_PAIRS_OF_POINTS**0.5):,} it takes; use labels=gaussian, or fewer samples "
            "(max_samples)"
        )


def _warn_not_converged(late: Sequence[str], options: SolverOptions) -> None:
    shown = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
    warnings.warn(
        f"labels=sinkhorn: not converged to {options.tolerance:g} after {options.max_iterations} "
        f"iterations for {shown}; raise labels.epsilon",
        NotConvergedWarning,
        stacklevel=2,
    )
