"""One transport term: epsilon and its tolerance, and the solved term with the bounds of its value.

Entry points resolve epsilon by `resolve_epsilon`, and errors name the setting and the unit in which
it was given (`epsilon_given_as`). `solver.solve` and `solver.small` take the stopping rule of the
iterations (`goal_of`) and of the term (`reachable_tolerance`), and make terms by
`TransportTerm.from_certificate`, as `solver.geomloss` does; this refuses a plan that rounding alone
decides. `labels.sinkhorn_pairs` raises the same error by `rounded_away`.

`ExactTerm` is the term at epsilon 0, unregularised, with its plan, which has few entries;
`solver.exact.solve` makes it. It is a `TransportTerm`, so that divergences and results hold either.
Whoever uses a plan (`DistanceResult`, `MatrixTransport`, `gromov.problem`) must ask first which of
the two the term is.

The fields in SUMMARIZED and the names in PLAN_TENSORS are keys of saved results, so they must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from otdd_flash.cost.points import Points
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.formulas.decision import Goal
from otdd_flash.formulas.evidence import MOST_ERROR
from otdd_flash.operators.base import Applied

if TYPE_CHECKING:
    # They import this file.
    from otdd_flash.solver.certificate import Certificate
    from otdd_flash.solver.schedules import Converged


# progress(term, iteration, marginal_error): term is "xy", "xx" or "yy".
SolverProgress = Callable[[str, int, float], None]
# progress(iteration, marginal_error), of one term.
TermProgress = Callable[[int, float], None]

# Why a solve ended. `rounding`: at this precision the bounds cannot get narrower or the marginals
# better; `schedule`: the fixed number of updates was done; `infeasible`: no plan has these masses
# without forbidden pairs; `optimal`: the bounds of exact transport are as close as rounding allows.
StoppedBy = Literal[
    "tolerance",
    "bound_width",
    "max_seconds",
    "max_iterations",
    "rounding",
    "schedule",
    "infeasible",
    "optimal",
]

# The fields of a term in its summary, besides its bounds.
SUMMARIZED = (
    "value",
    "marginal_error",
    "tolerance",
    "iterations",
    "passes",
    "converged",
    "stopped_by",
)


@dataclass(frozen=True, eq=False)
class TransportTerm:
    """OT_epsilon between two clouds: potentials, value, and bounds of its errors.

    Attributes:
        f: (n,) row potential, in units of the cost.
        g: (m,) column potential; the same tensor as `f` for a self term.
        epsilon: entropic regularisation, in units of the cost.
        value: the dual value D(f, g); stopped by `schedule`, geomloss's number, which can lie
            outside of `bounds`.
        bounds: solver bounds (lower, upper): an interval that holds OT_epsilon.
        marginal_error: bound of the larger of ||P 1 - a||_1, ||P^T 1 - b||_1, rounding included;
            relaxed marginals have what they owe for a and b.
        tolerance: the stopping tolerance, as asked for or as rounding allows; None where the width
            of the solver bounds decided.
        iterations: updates of both potentials, the certifying one included.
        passes: evaluations of the n x m scores, those of samples and certification included.
        converged: whether the goal of the options was reached.
        stopped_by: why the solve ended.
        mass: the mass that the plan moves, to which `marginal_error` is relative; 1 unless
            marginals are relaxed.
    """

    f: Tensor
    g: Tensor
    epsilon: float
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    tolerance: float | None
    iterations: int
    passes: float
    converged: bool
    stopped_by: StoppedBy
    mass: float = field(default=1.0, kw_only=True)

    @classmethod
    def from_certificate(
        cls,
        certificate: Certificate,
        epsilon: float,
        *,
        iterations: int,
        passes: float,
        tolerance: float,
        asked: float,
        unless_converged: StoppedBy,
    ) -> TransportTerm:
        """Build the term from its certificate and the work done.

        `asked` is the tolerance of the options, which rounding may have raised to `tolerance`.

        Raises:
            InputError: the undetectable part of the marginal error is too large.
        """
        check_usable(certificate.undetectable, epsilon, certificate.f.dtype)
        converged = certificate.marginal_error <= tolerance
        reached: StoppedBy = "tolerance" if certificate.marginal_error <= asked else "rounding"
        return cls(
            certificate.f,
            certificate.g,
            epsilon,
            certificate.value,
            certificate.bounds,
            certificate.marginal_error,
            tolerance,
            iterations,
            passes,
            converged,
            stopped_by=reached if converged else unless_converged,
            mass=certificate.mass,
        )

    def moved(self, device: torch.device) -> Self:
        """Return the term on another device."""
        return replace(self, f=self.f.to(device), g=self.g.to(device))

    def widened(self, error: float) -> TransportTerm:
        """Widen bounds and error for a cost that is off by at most `error`."""
        low, high = self.bounds
        error_of_value = error * max(1.0, self.mass)
        # No entry of the plan changes by more than this factor, nor do its marginals.
        growth = math.expm1(error / self.epsilon)
        return replace(
            self,
            bounds=(low - error_of_value, high + error_of_value),
            marginal_error=self.marginal_error + growth * (1 + self.marginal_error),
        )

    @classmethod
    def from_dict(
        cls, f: Tensor, g: Tensor, epsilon: float, summary: Mapping[str, Any]
    ) -> TransportTerm:
        """Restore a term from its potentials, (n,) and (m,), and the `summary` of `to_dict`."""
        low, high = summary["bounds"]
        # Infinite bounds, which JSON cannot hold, are null in files.
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        numbers = {key: summary[key] for key in SUMMARIZED}
        mass = summary.get("mass", 1.0)
        return cls(f, g, epsilon, bounds=(low, high), **numbers, mass=mass)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary of the term for result.json."""
        numbers = {key: getattr(self, key) for key in SUMMARIZED}
        moved = {} if self.mass == 1 else {"mass": self.mass}
        return {"value": numbers.pop("value"), "bounds": list(self.bounds), **numbers, **moved}


def largest_tolerance(tolerances: Iterable[float | None]) -> float | None:
    """Return the largest tolerance that is not None; None if all are."""
    return max((known for known in tolerances if known is not None), default=None)


# The default epsilon, over the mean cost.
DEFAULT_RELATIVE = 0.01
# The default epsilon of earlier versions, in units of the cost.
EARLIER_DEFAULT = 0.1

# The largest tolerance that rounding may raise the default one to. With a larger marginal error a
# plan would say little of the optimal one.
LOOSEST_DEFAULT = 0.1

# The marginal error that an advised epsilon should have, half of the most that is accepted.
AMPLE = LOOSEST_DEFAULT / 2


def refuse_both(epsilon: float | None, relative: float | None) -> None:
    """Refuse `epsilon` and `epsilon_relative` together.

    Raises:
        InputError: both are given.
    """
    if epsilon is not None and relative is not None:
        raise InputError(
            "give epsilon or epsilon_relative, one of them; got both, "
            f"epsilon={epsilon:g} and epsilon_relative={relative:g}"
        )


def default_hint(epsilon: object) -> str:
    """Return a hint that `epsilon` is the default of earlier versions; "" for another value."""
    if epsilon != EARLIER_DEFAULT:
        return ""
    return (
        f"; {EARLIER_DEFAULT} was the default of earlier versions, which epsilon={EARLIER_DEFAULT} "
        "gives today"
    )


def resolve_epsilon(
    epsilon: float | None, relative: float | None, mean_cost: Callable[[], float]
) -> tuple[str, float, float]:
    """Return the setting's name, its value, and the epsilon that follows, in units of the cost.

    By default epsilon is `DEFAULT_RELATIVE` of the mean cost, and 1 where that is not positive, as
    for a cost that is 0 everywhere.

    Args:
        epsilon: in units of the cost, or None.
        relative: as a multiple of the mean cost, or None.
        mean_cost: computes the mean cost; called unless `epsilon` is given.

    Raises:
        InputError: both are given, or `relative` with a mean cost that is not positive.
    """
    refuse_both(epsilon, relative)
    if epsilon is not None:
        return "epsilon", epsilon, epsilon
    mean = mean_cost()
    if relative is None:
        value = DEFAULT_RELATIVE * mean
        # A NaN passes: it is reported later, with its cause.
        return "epsilon_relative", DEFAULT_RELATIVE, 1.0 if value <= 0 else value
    if not mean > 0:
        raise InputError(
            f"epsilon_relative needs a positive mean cost; here it is {mean:g}: set epsilon"
        )
    return "epsilon_relative", relative, relative * mean


@contextmanager
def epsilon_given_as(name: str, given: float, epsilon: float) -> Iterator[None]:
    """Raise errors of this epsilon again under the user's setting and unit.

    Args:
        name: of the setting.
        given: its value.
        epsilon: its value in units of the cost; errors of another epsilon pass unchanged.

    Raises:
        EpsilonOutOfRange: as it was raised inside, under that name.
    """
    try:
        yield
    except EpsilonOutOfRange as error:
        if error.epsilon != epsilon:
            raise
        raise EpsilonOutOfRange(
            error.words, error.epsilon, error.advised, name=name, given=given
        ) from None


@contextmanager
def epsilon_of_datasets(
    name: str, given: float, epsilon: float, mean_cost: Callable[[], float], standardized: float
) -> Iterator[None]:
    """Raise errors as `epsilon_given_as`, with further advice that applies to datasets.

    Args:
        name: of the setting.
        given: its value.
        epsilon: its value in units of the cost.
        mean_cost: computes the mean cost; called where that epsilon is too small.
        standardized: about the mean cost of standardized features.

    Raises:
        EpsilonOutOfRange: as it was raised inside, with that advice.
    """
    with epsilon_given_as(name, given, epsilon):
        try:
            yield
        except EpsilonOutOfRange as error:
            if error.advised is None or error.epsilon != epsilon:
                raise
            mean, ways = mean_cost(), ""
            if name == "epsilon" and DEFAULT_RELATIVE * mean >= error.advised:
                ways += f", or give epsilon_relative={DEFAULT_RELATIVE} in its place"
            if name == "epsilon" and epsilon * mean >= error.advised * standardized:
                ways += (
                    ", or standardize the features (extractor.standardize=true, in Python "
                    "otdd.extractors.standardize)"
                )
            raise EpsilonOutOfRange(error.words + ways, error.epsilon, error.advised) from None


def or_double(dtype: torch.dtype) -> str:
    """Return the advice to use float64, as part of a list; "" if it is used already."""
    return "" if dtype == torch.float64 else ", set precision=double"


def goal_of(options: Converged, epsilon: float, aim: float) -> Goal:
    """Return the stopping criterion of a term's iterations; the certificate counts as the last."""
    asked = options.asked_tolerance
    gives_way = options.tolerance is None or options.bound_width is not None
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    loosest = max(asked, most) if gives_way else asked
    return Goal(epsilon, asked, loosest, options.max_iterations - 1, aim)


def reachable_tolerance(
    options: Converged, floor: float, epsilon: float, dtype: torch.dtype
) -> float:
    """Return the marginal error to stop at: the tolerance, or the least that rounding allows.

    Rounding may raise the default tolerance up to `LOOSEST_DEFAULT`. Where the width of the bounds
    decides, no marginal error was asked for, and the least that rounding allows is always accepted.

    Raises:
        InputError: as `check_reachable`, where the tolerance may not be raised, or not so far.
    """
    asked, least = options.asked_tolerance, 2 * floor
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    if (options.tolerance is None or options.bound_width is not None) and least < most:
        return max(asked, least)
    check_reachable(asked, floor, epsilon, dtype)
    return asked


class UnreachableTolerance(InputError):
    """A tolerance below the marginal error that rounding causes at this epsilon."""


def check_reachable(tolerance: float, floor: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a tolerance below the marginal error that rounding allows.

    `floor`, the marginal error that rounding causes, counts twice: it is part of the reported
    error, and the measured rest cannot fall below it either.

    Raises:
        UnreachableTolerance: twice `floor` exceeds `tolerance`.
        EpsilonOutOfRange: it exceeds every tolerance.
    """
    if 2 * floor > tolerance:
        if 2 * floor >= LOOSEST_DEFAULT:
            raise rounded_away(2 * floor, epsilon, dtype)
        raise UnreachableTolerance(
            f"solver.tolerance={tolerance:g} is too tight for {_name(dtype)} at epsilon="
            f"{epsilon:g}: rounding alone moves the marginals by up to {2 * floor:.1e}; raise "
            f"solver.tolerance or epsilon{_or_double(2 * floor, tolerance, dtype)}"
        )


def check_usable(error: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a plan whose undetectable marginal `error` exceeds `LOOSEST_DEFAULT`.

    Raises:
        InputError: `error` does.
    """
    if not error < float("inf"):
        raise EpsilonOutOfRange(
            "some costs are too far above the mean at {given}: rounding alone decides about the "
            f"masses of their points; raise {{name}}{or_double(dtype)} or leave out points that "
            "are far from all others",
            epsilon,
        )
    if error > LOOSEST_DEFAULT:
        raise rounded_away(error, epsilon, dtype)


def rounded_away(
    error: float, epsilon: float, dtype: torch.dtype, enough: float = AMPLE
) -> EpsilonOutOfRange:
    """Return the error for marginals that rounding moves by `error`; by `enough` as advised."""
    advised = epsilon * error / enough
    if not advised < float("inf"):
        return EpsilonOutOfRange(
            f"{{given}} is too small for {_name(dtype)}: rounding leaves nothing of the marginals; "
            "raise {name}",
            epsilon,
        )
    return EpsilonOutOfRange(
        f"{{given}} is too small for {_name(dtype)}: rounding alone moves the marginals by up to "
        f"{error:.1e}; raise {{name}} to about {{advised}}{_or_double(error, enough, dtype)}",
        epsilon,
        advised,
    )


def _or_double(error: float, enough: float, dtype: torch.dtype) -> str:
    """Return the advice to use float64 where that would do, else ""."""
    gained = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return " or set precision=double" if dtype != torch.float64 and error * gained < enough else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Numbers of values that are multiplied at once.
VALUES_AT_ONCE = 1 << 24

# The names of a plan's tensors in files, after that of the term.
PLAN_TENSORS = ("rows", "columns", "masses")


@dataclass(frozen=True, eq=False)
class ExactTerm(TransportTerm):
    """OT_0 between two clouds: a plan with few entries, potentials, and a proven interval.

    Attributes of a `TransportTerm` mean the following at epsilon 0.

    Attributes:
        f: (n,) row potential, in units of the cost: f_i = min_j (C_ij - g_j). Potentials are those
            of the lower end; others may prove as much.
        g: (m,) column potential.
        epsilon: 0.
        value: the cost of the plan as computed, within `bounds`; inf if there is none.
        bounds: (lower, upper): an interval that holds OT_0.
        marginal_error: bound of the larger L1 error of the plan's marginals, which is rounding.
        tolerance: None.
        iterations: linear programs solved.
        passes: evaluations of all costs, those of the potentials that it starts from included.
        converged: whether the width that was asked for was reached, or the plan proved `optimal`.
        stopped_by: `optimal`, the plan is optimal and the interval as narrow as rounding allows;
            `rounding`, that leaves it wider, as where few costs are far above the others;
            `infeasible`, no plan without forbidden pairs has these masses; else as elsewhere.
        rows: (k,) int64, the rows of the entries of the plan, k at most n + m - 1.
        columns: (k,) int64, their columns.
        masses: (k,) float64, their masses.
    """

    rows: Tensor
    columns: Tensor
    masses: Tensor

    @classmethod
    def of(cls, term: TransportTerm, plan: tuple[Tensor, Tensor, Tensor]) -> Self:
        """Add rows, columns and masses of its plan to a term."""
        rows, columns, masses = plan
        known = {each.name: getattr(term, each.name) for each in fields(TransportTerm)}
        return cls(**known, rows=rows, columns=columns, masses=masses)

    def plan(self) -> Tensor:
        """Return the plan P (n, m), sparse COO, coalesced, float64."""
        shape = len(self.f), len(self.g)
        found = torch.sparse_coo_tensor(
            torch.stack((self.rows, self.columns)), self.masses, shape, check_invariants=True
        )
        return found.coalesce()

    def applied(self, values: Points, *, transposed: bool = False) -> Applied:
        """Compute P V (n, k) for V (m, k) and P 1 (n,), or P^T U (m, k) and P^T 1, in float64."""
        to, of, count = self.rows, self.columns, len(self.f)
        if transposed:
            to, of, count = of, to, len(self.g)
        device, width = self.masses.device, values.shape[1]
        found = self.masses.new_zeros((count, width))
        size = max(1, VALUES_AT_ONCE // max(1, width))
        parts = zip(*(torch.split(each, size) for each in (to, of, self.masses)), strict=True)
        for into, out_of, masses in parts:
            some = values[out_of.to(values.device)].to(device, torch.float64)
            found.index_add_(0, into, some * masses[:, None])
        return Applied(found, self.masses.new_zeros(count).index_add_(0, to, self.masses))

    def moved(self, device: torch.device) -> Self:
        """Return the term on another device."""
        names = ("f", "g", *PLAN_TENSORS)
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def plan_tensors(name: str, term: TransportTerm) -> dict[str, Tensor]:
    """Return the tensors of a term's plan for a file, by names that begin with that of the term."""
    if not isinstance(term, ExactTerm):
        return {}
    return {f"{name}.plan.{each}": getattr(term, each) for each in PLAN_TENSORS}


def with_plan(name: str, term: TransportTerm, tensors: Mapping[str, Tensor]) -> TransportTerm:
    """Return the term that `plan_tensors` stored the plan of; as it is if there is none."""
    rows, columns, masses = (tensors.get(f"{name}.plan.{each}") for each in PLAN_TENSORS)
    if rows is None or columns is None or masses is None:
        return term
    return ExactTerm.of(term, (rows, columns, masses))
