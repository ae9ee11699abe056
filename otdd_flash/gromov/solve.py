"""The outer loop of Gromov-Wasserstein: linearise, solve, repeat, from several starts.

`distance` calls `solve_gromov`. Each step is a `Comparison` of the same two datasets whose
transformed points are those of the linearised cost, so that every solver, kernel and question about
the plan takes it as any other comparison by inner products.

F(P) + epsilon KL(P | a b^T) does not rise from step to step, up to the marginal errors of the
solves; F alone may, as entropy grows. `value` is F of a plan whose sums are corrected (Altschuler
et al. 2017, Near-linear time approximation algorithms for optimal transport), evaluated in float64:
an upper bound of the least F, whatever the solves did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import NO_OFFSET, GroundCost
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.errors import InputError
from otdd_flash.gromov.bounds import class_bound, eccentricity_bound, spectral_bound
from otdd_flash.gromov.energy import OPERATIONS, Cloud, Energy
from otdd_flash.gromov.starts import starts
from otdd_flash.operators.base import Applied
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.exact.term import ExactTerm
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.exact import Exact
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import SolverProgress, StoppedBy, TransportTerm

# Steps end where F + epsilon KL falls by less than this share of the tolerance, in units of
# F(a b^T), and at epsilon 0 where it falls by no more than rounding. Of all starts but the best,
# steps end at the first share of F(a b^T).
EXPLORED, LEAST_FALL, EXACT_FALL = 1e-4, 1e-3, 1e-13

# How far beyond the last plan's M a step linearises, over the distance from that before.
FIRST_STRETCH, MOST_STRETCH = 0.5, 8.0

MOST_STEPS = 1000

# The seconds of a solve whose time is over: it then gets its one iteration.
NO_TIME = 1e-9

# P V for V (m, k), or if True P^T U for U (n, k).
Product = Callable[[Tensor, bool], Applied]


class Start(NamedTuple):
    """A start and the local minimum that it led to.

    Attributes:
        name: `axes`, `classes`, `independent` or `random k`.
        value: F of the plan found, with its sums corrected.
        steps: linearisations.
    """

    name: str
    value: float
    steps: int


@dataclass(frozen=True, eq=False)
class Gromov:
    """What a Gromov-Wasserstein distance is besides its value, bounds and plan.

    Attributes:
        energy: E of the plan found, with its sums corrected.
        energy_bounds: two lower bounds of E over all plans, of eccentricities and of spectra.
        class_cost: <W, P> of the plan found.
        class_lower: a lower bound of it over all plans.
        independent: F(a b^T), the unit of `epsilon_relative`.
        starts: the value that each start led to.
        objectives: F + epsilon KL of every step from the best start.
        matrix: M (d_x, d_y) float64 of the last linearised cost.
    """

    energy: float
    energy_bounds: tuple[float, float]
    class_cost: float
    class_lower: float
    independent: float
    starts: tuple[Start, ...]
    objectives: tuple[float, ...]
    matrix: Tensor

    @property
    def gw(self) -> float:
        """GW_2 in Memoli's sense, sqrt(E) / 2, of the plan found."""
        return math.sqrt(max(self.energy, 0.0)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json; `matrix` is a tensor of its own."""
        own = ("energy", "class_cost", "class_lower", "independent", "gw")
        return {
            **{name: getattr(self, name) for name in own},
            "energy_bounds": dict(zip(BOUNDS, self.energy_bounds, strict=True)),
            "starts": [start._asdict() for start in self.starts],
            "objectives": list(self.objectives),
        }

    @classmethod
    def from_dict(cls, summary: Mapping[str, Any], matrix: Tensor) -> Gromov:
        """Restore the record from its `to_dict` and `matrix`."""
        own = ("energy", "class_cost", "class_lower", "independent")
        return cls(
            **{name: summary[name] for name in own},
            energy_bounds=tuple(summary["energy_bounds"][name] for name in BOUNDS),
            starts=tuple(Start(**start) for start in summary["starts"]),
            objectives=tuple(summary["objectives"]),
            matrix=matrix,
        )


# Names of the lower bounds of E.
BOUNDS = ("eccentricities", "spectra")


class Step(NamedTuple):
    """One linearised problem.

    Attributes:
        matrix: M (d_x, d_y) at which it is linearised.
        following: X^T P Y of its plan.
        solved: its solve.
        objective: F + epsilon KL of its plan.
        potential: (m,) of the inner products, from which the next one starts.
    """

    matrix: Tensor
    following: Tensor
    solved: Divergence
    objective: float
    potential: Tensor


class Local(NamedTuple):
    """A local minimum: its last step, whose solve counts all, and F + epsilon KL of each."""

    last: Step
    objectives: list[float]


class Corrected(NamedTuple):
    """E and the masses between classes (V_x, V_y) of a plan whose sums were corrected."""

    energy: float
    classes: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Two datasets and F of the plans between them.

    Attributes:
        compared: the datasets at an epsilon, with W, and `ground="inner"`.
        energy: E, of the same rows.
    """

    compared: Comparison
    energy: Energy

    @classmethod
    def of(cls, compared: Comparison) -> Problem:
        """Return the problem of a comparison whose points are the given ones.

        Raises:
            InputError: fourth powers of features overflow.
        """
        source, target = compared.transformed
        found = cls(compared, Energy(Cloud.of(source), Cloud.of(target)))
        if not math.isfinite(found.independent):
            raise InputError(
                "ground=gromov takes fourth powers of features, which overflow; scale them down"
            )
        return found

    @property
    def independent(self) -> float:
        """F(a b^T)."""
        rows, columns = (self.class_masses(place) for place in (0, 1))
        return self.value(Corrected(self.energy.independent, rows[:, None] * columns))

    @property
    def table(self) -> Tensor:
        """W (V_x, V_y), float64 on the points' device."""
        return self.compared.block("xy").to(self.energy.x.points)

    def class_cost(self, classes: Tensor) -> float:
        """Return <W, P> of masses between classes (V_x, V_y)."""
        return float((self.table * classes).sum())

    def value(self, plan: Corrected) -> float:
        """Return F of a plan."""
        ground = self.compared.ground
        return ground.lambda_x * plan.energy + ground.lambda_y * self.class_cost(plan.classes)

    def class_masses(self, place: int) -> Tensor:
        """Return the masses of classes (V,) of one side."""
        cloud = (self.energy.x, self.energy.y)[place]
        return self.one_hot(place).T @ cloud.masses

    def one_hot(self, place: int) -> Tensor:
        """Return which class each row of a side has, (n, V) float64; sets of labels are classes."""
        side = self.compared.transformed[place]
        device = side.features.device
        if side.labels is None:
            return torch.ones(len(side), 1, dtype=torch.float64, device=device)
        return torch.nn.functional.one_hot(side.labels, side.class_total).double()

    def linearised(self, matrix: Tensor) -> Comparison:
        """Return the comparison by the linearised cost at M (d_x, d_y)."""
        points = self.energy.linear_points(matrix)
        pairs = zip(self.compared.transformed, points, strict=True)
        moved = tuple(replace(side, features=each, feature_names=None) for side, each in pairs)
        return replace(self.compared, transformed=moved)

    def moments(self, apply: Product) -> tuple[float, Tensor]:
        """Return <P, u v^T> and X^T P Y of the plan of a product."""
        x, y = self.energy.x, self.energy.y
        values = torch.cat((y.points, y.centred_norms[:, None]), 1)
        found = apply(values, False).values.double()
        return float(x.centred_norms @ found[:, -1]), x.points.T @ found[:, :-1]

    def corrected(self, step: Step) -> Corrected:
        """Evaluate the plan of a step in float64, with its sums corrected.

        Rows and columns that have too much are scaled down, and what is then missing is added as
        the product of what is missing of rows and of columns.
        """
        x, y, kinds = self.energy.x, self.energy.y, self.one_hot(1)
        apply = plan_of(self.linearised(step.matrix), step.solved.xy, double=True)
        rows = apply(torch.ones_like(y.masses)[:, None], False).masses
        left = _share(x.masses, rows)
        columns = apply(left[:, None], True).values.double().squeeze(1)
        right = _share(y.masses, columns)
        values = torch.cat((y.points, y.centred_norms[:, None], kinds, kinds[:, :1] * 0 + 1), 1)
        found = left[:, None] * apply(right[:, None] * values, False).values.double()
        missing = (x.masses - found[:, -1]).clamp_min(0), (y.masses - right * columns).clamp_min(0)
        total = float(missing[0].sum())
        if total > 0:
            share = missing[1] / missing[1].sum().clamp_min(torch.finfo(torch.float64).tiny)
            found += missing[0][:, None] * (share @ values)
        width = y.points.shape[1]
        norms = float(x.centred_norms @ found[:, width])
        energy = self.energy.value(norms, x.points.T @ found[:, :width])
        return Corrected(energy, self.one_hot(0).T @ found[:, width + 1 : -1])


def _share(wanted: Tensor, sums: Tensor) -> Tensor:
    """Return what sums are scaled by so that they are at most those that are wanted."""
    return torch.where(sums > wanted, wanted / sums, torch.ones_like(wanted))


def plan_of(linear: Comparison, term: TransportTerm, *, double: bool = False) -> Product:
    """Return the product of a term's plan with values (m, k), or if True its transpose's (n, k)."""
    if isinstance(term, ExactTerm):
        return lambda values, transposed: term.applied(values, transposed=transposed)
    if double:
        in_double = replace(linear.compute, precision="double", backend="torch")
        linear = replace(linear, compute=in_double)
    plan = linear.operator("xy", keep_scores=False).refined.plan(term.f, term.g, term.epsilon)
    return lambda values, transposed: plan.applied(values, transposed=transposed)


def take_step(
    problem: Problem,
    matrix: Tensor,
    options: Converged | Exact,
    potential: Tensor | None = None,
    progress: SolverProgress | None = None,
) -> Step:
    """Linearise at M (d_x, d_y) and solve.

    Args:
        problem: at its epsilon.
        matrix: M, of any plan or of none.
        options: of the solve.
        potential: (m,) of `Step` to start from.
        progress: called in every iteration.
    """
    weight, energy = problem.compared.ground.lambda_x, problem.energy
    linear = problem.linearised(matrix)
    # Potentials of squared distances differ from those of inner products by these.
    lengths = weight / 2 * linear.transformed[1].features.square().sum(1)
    start = None if potential is None else {"xy": potential + lengths}
    solved = solve(linear, options, start=start, progress=progress)
    norms, following = problem.moments(plan_of(linear, solved.xy))
    above = energy.value(norms, following) - energy.linear(matrix, norms, following)
    objective = solved.value + weight * above
    return Step(matrix, following, solved, objective, solved.xy.g.double() - lengths)


def descend(
    problem: Problem,
    matrix: Tensor,
    options: Converged | Exact,
    least: float,
    end: float = math.inf,
    progress: SolverProgress | None = None,
    potential: Tensor | None = None,
) -> Local:
    """Take steps from M (d_x, d_y) until F + epsilon KL falls by no more than `least`.

    With entropy, steps become longer as long as they fall: they linearise at M beyond the last
    plan's, on the line from that before. One that rises is taken again from the last plan's M.
    """
    best: Step | None = None
    stretch, accepted, iterations, passes = 0.0, list[float](), 0, 0.0
    while True:
        limited = replace(options, max_seconds=_seconds_left(end))
        step = take_step(problem, matrix, limited, potential, progress)
        iterations, passes = iterations + step.solved.xy.iterations, passes + step.solved.passes
        fall = math.inf if best is None else best.objective - step.objective
        stretched = stretch > 0
        if fall > 0:
            # At epsilon 0 plans are vertices, and M on the line between two is of none.
            grown = max(FIRST_STRETCH, min(2 * stretch, MOST_STRETCH))
            stretch = grown if best is not None and isinstance(options, Converged) else 0.0
            beyond = 0.0 if best is None else step.following - best.following
            best, potential = step, step.potential
            accepted.append(step.objective)
            matrix = step.following + stretch * beyond
        else:
            assert best is not None
            matrix, stretch = best.following, 0.0
        # A NaN ends, too.
        ended = not fall > least and not (stretched and not fall > 0)
        late = not ended and time.perf_counter() >= end
        if ended or late or len(accepted) == MOST_STEPS:
            reason: StoppedBy = "max_seconds" if late else "max_iterations"
            term = replace(best.solved.xy, iterations=iterations, passes=passes)
            if not ended:
                term = replace(term, converged=False, stopped_by=reason)
            solved = replace(best.solved, xy=term, passes=passes)
            return Local(best._replace(solved=solved), accepted)


def _seconds_left(end: float) -> float | None:
    return None if end == math.inf else max(end - time.perf_counter(), NO_TIME)


def solve_gromov(
    compared: Comparison,
    options: Converged | Exact,
    number: int,
    progress: SolverProgress | None = None,
) -> tuple[Comparison, Divergence, Gromov]:
    """Find the best local minimum of several starts.

    Args:
        compared: two datasets at an epsilon, with W, and `ground="inner"`.
        options: of every solve.
        number: of starts.
        progress: called in every iteration of the solves.

    Returns:
        The comparison by the last linearised cost; its solve, with value and bounds of F; and the
        rest.
    """
    problem, ground = Problem.of(compared), compared.ground
    end = math.inf if options.max_seconds is None else time.perf_counter() + options.max_seconds
    if isinstance(options, Exact):
        # A plan that is not the best of its step need not have a smaller E.
        options = replace(options, bound_width=0.0)
    fall = EXACT_FALL
    if isinstance(options, Converged):
        fall = LEAST_FALL * options.asked_tolerance
    explored = max(EXPLORED, fall) if isinstance(options, Converged) else fall
    least = fall * problem.independent
    found: list[tuple[Local, Corrected, Start]] = []
    for name, matrix in starts(problem.energy, compared, number):
        if found and time.perf_counter() >= end:
            break
        local = descend(problem, matrix, options, explored * problem.independent, end, progress)
        corrected = problem.corrected(local.last)
        start = Start(name, problem.value(corrected), len(local.objectives))
        found.append((local, corrected, start))
    place = min(range(len(found)), key=lambda each: found[each][2].value)
    local, corrected, best = found[place]
    if explored > fall and local.last.solved.converged:
        more = descend(
            problem, local.last.following, options, least, end, progress, local.last.potential
        )
        local = Local(_counted(local.last, more.last), local.objectives + more.objectives)
        corrected = problem.corrected(more.last)
        best = Start(best.name, problem.value(corrected), len(local.objectives))
        found[place] = local, corrected, best
    lower, gromov_lower, class_lower = _lower(problem)
    gromov = Gromov(
        corrected.energy,
        gromov_lower,
        problem.class_cost(corrected.classes),
        class_lower,
        problem.independent,
        tuple(start for *_, start in found),
        tuple(local.objectives),
        local.last.matrix.cpu(),
    )
    # Sums of as many products as there are points; W is that of `compared`.
    sizes = sum(compared.shape) + OPERATIONS
    of_classes = sizes * DOUBLE_UNIT * float(problem.table.abs().max())
    rounding = ground.lambda_x * problem.energy.rounding + ground.lambda_y * of_classes
    bounds = lower - compared.label_error, best.value + rounding + compared.label_error
    # The potentials and the marginal error are those of the linearised cost.
    solved = local.last.solved
    term = replace(solved.xy, value=best.value, bounds=bounds)
    solved = replace(solved, xy=term, offset=NO_OFFSET)
    return problem.linearised(local.last.matrix), solved, gromov


def _counted(before: Step, last: Step) -> Step:
    """Return the last step with the work of an earlier one."""
    one, other = before.solved.xy, last.solved.xy
    iterations, passes = one.iterations + other.iterations, one.passes + other.passes
    term = replace(other, iterations=iterations, passes=passes)
    return last._replace(solved=replace(last.solved, xy=term, passes=passes))


def _lower(problem: Problem) -> tuple[float, tuple[float, float], float]:
    """Return the lower bound of F, both of E, and that of <W, P>."""
    ground = problem.compared.ground
    of_energy = eccentricity_bound(problem.energy), spectral_bound(problem.energy)
    of_classes = class_bound(problem.table, problem.class_masses(0), problem.class_masses(1))
    lower = ground.lambda_x * max(of_energy) + ground.lambda_y * of_classes
    return lower, of_energy, of_classes


def linear_comparison(
    datasets: tuple[LabeledSamples, LabeledSamples],
    cost: GroundCost,
    compute: ComputeOptions,
    table: Tensor,
    epsilon: float,
    matrix: Tensor,
) -> Comparison:
    """Return the comparison by the last linearised cost again, for the plan of a loaded result."""
    problem = Problem.of(prepare(datasets, cost, compute).with_classes(table).at(epsilon))
    return problem.linearised(matrix.to(problem.energy.x.points))


def prepare(
    datasets: Sequence[LabeledSamples], cost: GroundCost, compute: ComputeOptions
) -> Comparison:
    """Move datasets to the device; every two of them can be compared then, by `ground="inner"`.

    Raises:
        InputError: they do not fit there.
    """
    return Comparison.prepare(datasets, cost, compute, debias=False, resident=True)
