"""One problem while a `PooledSolve` solves it: how far it is, and the terms that it ends with."""

from __future__ import annotations

import math

import torch

from otdd_flash.cost.class_table import ROUNDING
from otdd_flash.cost.facts import TERMS, CostFacts
from otdd_flash.errors import InputError
from otdd_flash.operators.score_pool import UNIT
from otdd_flash.solver.certificate import PlanEvidence, conclude, shows_rounding
from otdd_flash.solver.divergence import Potentials
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.exchanged import Batch, GivenCosts, Read, TermRead
from otdd_flash.solver.small.pooled_solve import PooledSolve
from otdd_flash.solver.solve import TOLERANCE_AIM
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import goal_of, reachable_tolerance


def facts_of(read: TermRead) -> CostFacts:
    """What was read of the costs of a term."""
    mean, lowest, highest = read.costs
    facts = CostFacts(torch.float32, mean, lowest, highest, error=0.0)
    # Nearly all of it is the rounding of what is stored.
    return facts._replace(error=UNIT * (1 + 2.0**-8) * facts.magnitude)


class SingleSolve:
    """A problem while it is solved.

    Args:
        solve: with room for it.
        sizes: n and m.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        known: of the costs; None where the solve learns it.

    Attributes:
        costs: what is known of the costs of each term, after `solved`.
        asymmetric: whether a self term's class distances are not symmetric.
    """

    def __init__(
        self,
        solve: PooledSolve,
        sizes: tuple[int, int],
        epsilon: float,
        options: Converged,
        known: CostFacts | None = None,
    ) -> None:
        self._solve, self._sizes, self._known = solve, sizes, known
        self._epsilon, self._options = epsilon, options
        self._in_triton = solve.room.in_triton
        self.costs: dict[str, CostFacts] = {}
        self.asymmetric = False

    def solved(
        self,
        batch: Batch | GivenCosts,
        of_costs: tuple[float, float, float],
        start: Potentials | None,
        progress: SolverProgress | None,
    ) -> dict[str, TransportTerm] | None:
        """Its terms; None where one of them needs another solve."""
        # A certificate finds a little more than the iterations: it lowers g for rounding.
        goal = goal_of(self._options, self._epsilon, TOLERANCE_AIM)
        starts = {name: g[None] for name, g in (start or {}).items()}
        self._solve.begin(batch, of_costs, goal, starts)
        found, done = None, False
        while found is None or not done:
            self._solve.iterate(progress)
            found = self._solve.read()
            if not self._reachable(found, progress):
                return None
            # Costs that are not finite end nowhere.
            done = found.done or any(math.isnan(read.error) for read in found.terms(0))
        apart, largest = found.asymmetry()[0].view(2, 2)
        self.asymmetric = bool((apart > ROUNDING * largest).any())
        f, *others = self._solve.potentials(self._sizes)
        terms: dict[str, TransportTerm] = {}
        reads = found.terms(0)
        for name, read, evidence, g in zip(TERMS, reads, found.evidence, others, strict=False):
            evidence = evidence._replace(f=f if name == "xy" else g, g=g)
            costs = self.costs[name]
            term = _concluded(name, read, costs, evidence, self._epsilon, self._options)
            if term is None:
                return None
            # The certificate of a self term is an iteration more.
            if progress is not None and term.iterations > read.iterations and not self._in_triton:
                progress(name, term.iterations, term.marginal_error)
            terms[name] = term
        return terms

    def _reachable(self, found: Read, progress: SolverProgress | None) -> bool:
        """Whether costs are in range.

        Raises:
            InputError: the tolerance is out of reach.
        """
        for name, read in zip(TERMS, found.terms(0), strict=False):
            # As before a single term: most hopeless tolerances show by the costs alone.
            costs = self.costs[name] = self._known or facts_of(read)
            if not costs.largest < torch.finfo(costs.dtype).max / 4:
                return False
            floor = rounding_floor(costs, 0.0, self._epsilon)
            reachable_tolerance(self._options, floor, self._epsilon, costs.dtype)
            if progress is not None and self._in_triton:
                progress(name, int(read.iterations), read.error)
        return True


def _concluded(
    name: str,
    read: TermRead,
    costs: CostFacts,
    evidence: PlanEvidence,
    epsilon: float,
    options: Converged,
) -> TransportTerm | None:
    """The term, or None where iterations should go on."""
    numbers = read.numbers
    if name == "xy" and shows_rounding(costs, numbers, epsilon):
        return None
    certificate = conclude(costs, evidence, numbers, epsilon)
    floor = rounding_floor(costs, numbers.size, epsilon)
    exhausted = read.iterations >= options.max_iterations - 1
    try:
        tolerance = reachable_tolerance(options, floor, epsilon, costs.dtype)
    except InputError:
        if exhausted:
            # Potentials of few iterations may be far larger than those of the solution.
            return None
        raise
    if (certificate.marginal_error > tolerance and not exhausted) or numbers.lost > 0:
        return None
    # The certificate of a cross term takes what its last iteration evaluated.
    iterations = int(read.iterations) + (name != "xy")
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=certificate.passes + (2.0 * iterations if name == "xy" else iterations - 1),
        tolerance=tolerance,
        asked=options.asked_tolerance,
        unless_converged="max_iterations",
    )
