"""One problem, solved by the library through its public functions and held against the truth."""

from __future__ import annotations

import math
import re
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import otdd_flash as otdd
from experiments.exact_families.building import mirrored
from experiments.exact_families.marginals import marginal_error
from experiments.exact_families.problem import Problem, Side, factor_costs
from experiments.exact_families.routes import ROUTES, Request
from experiments.exact_families.settings import Settings
from experiments.exact_families.transport import Truth, entropic_transport

# A truth that is less certain than this, in mean costs, decides nothing.
UNCERTAIN = 1e-11
# What a refusal has to name: something that the user can do.
WAY_OUT = re.compile(
    r"\b(raise|lower|set|use|scale|pass|take|leave out|remove|choose|drop|drops|free|reduce)\b"
)


@dataclass
class Outcome:
    """What came of a problem.

    Attributes:
        status: `held`, `violated`, `refused`, or `undecided` where the truth is too uncertain.
        findings: what was wrong, each with what was checked and how far outside, in mean costs.
        refusal: the message of an `InputError`, numbers replaced by #.
        width: of the reported interval, in mean costs.
        stopped_by: what ended the solve.
        checked: how many intervals and marginal errors were held against a truth.
        seconds: of the library.
    """

    status: str = "held"
    findings: list[dict[str, Any]] = field(default_factory=list)
    refusal: str | None = None
    width: float | None = None
    stopped_by: str | None = None
    checked: dict[str, int] = field(default_factory=lambda: {"bounds": 0, "marginals": 0})
    seconds: float = 0.0


@dataclass
class Check:
    """Collects findings about one result; numbers are reported in units of `scale`."""

    problem: Problem
    epsilon: float
    scale: float
    outcome: Outcome

    def interval(self, what: str, bounds: tuple[float, float], truth: Truth) -> None:
        """The truth lies within the bounds but for its own error."""
        lower, upper = bounds
        if truth.error > UNCERTAIN * self.scale or not math.isfinite(truth.error):
            # An interval that excludes even the uncertain truth is wrong all the same.
            self.outcome.status = "undecided"
        self.outcome.checked["bounds"] += 1
        if not (math.isfinite(lower) and math.isfinite(upper) and lower <= upper):
            self.find("no interval", what, bounds=[lower, upper])
            return
        outside = max(lower - truth.value, truth.value - upper) - truth.error
        if outside > 0:
            self.find("bounds", what, outside, bounds=[lower, upper], truth=truth.value)

    def term(self, name: str, term: Any, problem: Problem | None = None) -> None:
        """Bounds, value and marginal error of one solved term."""
        problem = problem or self.problem
        self.interval(name, term.bounds, problem.truth(name, self.epsilon))
        inside = term.bounds[0] <= term.value <= term.bounds[1]
        if term.stopped_by != "schedule" and not inside:
            self.find("value", name, value=term.value, bounds=list(term.bounds))
        found = marginal_error(problem, name, term.f, term.g, self.epsilon)
        if found is None:
            return
        self.outcome.checked["marginals"] += 1
        if not found[0] - found[1] <= term.marginal_error:
            self.find(
                "marginal error",
                name,
                found[0] - term.marginal_error,
                exact=found[0],
                reported=term.marginal_error,
            )

    def find(self, kind: str, what: str, outside: float | None = None, **numbers: Any) -> None:
        """Note what was wrong; `outside` in units of the cost, or of mass for marginal errors."""
        if outside is not None and kind != "marginal error":
            outside /= self.scale
        # JSON holds neither infinities nor NaN.
        shown = {key: repr(value) for key, value in numbers.items()}
        if outside is not None and not math.isfinite(outside):
            shown["outside by"], outside = repr(outside), None
        self.outcome.findings.append(
            {"kind": kind, "of": what, "outside": outside, "mean_cost": self.scale, **shown}
        )


def check(problem: Problem, settings: Settings, device: str = "cpu") -> Outcome:
    """Solve and compare; never raises for what the library does."""
    outcome = Outcome()
    rewritten = {"identical": None, "mirror": None, "copy": np.random.default_rng(0)}
    if settings.route in rewritten:
        problem = mirrored(problem, rewritten[settings.route])
    scale = problem.scale()
    epsilon = settings.relative_epsilon * scale
    state = Check(problem, epsilon, scale, outcome)
    route = _class_pairs if has_pairs(problem, settings) else _solved
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", otdd.NotConvergedWarning)
            route(state, settings, device)
    except otdd.InputError as error:
        outcome.status, outcome.refusal = "refused", re.sub(r"[-+]?\d[\d.e+-]*", "#", str(error))
        if not WAY_OUT.search(str(error)):
            state.find("refusal names no way out", str(error))
    except Exception as error:
        # No folders of this machine.
        message = re.sub(r"(/[\w.+-]+)+/", "", str(error))
        state.find(type(error).__name__, message[:300])
    if outcome.findings:
        outcome.status = "violated"
    return outcome


def _solved(state: Check, settings: Settings, device: str) -> None:
    """Terms and, where it was asked for, the divergence of them."""
    problem, outcome = state.problem, state.outcome
    request = Request(problem, settings, state.epsilon, settings.compute(device))
    started = time.perf_counter()
    solved = ROUTES[settings.route](request)
    outcome.seconds = time.perf_counter() - started
    if solved.debiased:
        xy, xx, yy = (problem.truth(name, state.epsilon) for name in ("xy", "xx", "yy"))
        state.interval("S", solved.bounds, _halved(xy, xx, yy))
    for name, term in solved.terms.items():
        state.term(name, term)
    outcome.width = (solved.bounds[1] - solved.bounds[0]) / state.scale
    outcome.stopped_by = solved.stopped_by


def _class_pairs(state: Check, settings: Settings, device: str) -> None:
    """Debiased distances of all pairs of classes, for the cost ||x - y||^2 whatever the weights."""
    sides = (state.problem.x, state.problem.y)
    tolerance = settings.options.get("tolerance", 1e-3)
    metric = otdd.labels.Sinkhorn(epsilon=state.epsilon, tolerance=tolerance)
    started = time.perf_counter()
    found = otdd.class_distances([side.samples for side in sides], metric)
    state.outcome.seconds = time.perf_counter() - started
    assert found.lower is not None
    assert found.upper is not None
    classes = [(side, k) for side in sides for k in range(side.samples.class_total)]
    own = [_between(one, one, state.epsilon) for one in classes]
    for i, j in np.argwhere(np.tri(len(classes), k=-1)).tolist():
        bounds = float(found.lower[i, j]), float(found.upper[i, j])
        cross = _between(classes[i], classes[j], state.epsilon)
        state.interval(f"pair {i} {j}", bounds, _halved(cross, own[i], own[j]))


def _between(one: tuple[Side, int], other: tuple[Side, int], epsilon: float) -> Truth:
    """OT_epsilon between two classes, each of mass 1."""
    cost = otdd.GroundCost(1.0, 0.0)
    (left, row), (right, column) = one, other
    first, second = left.factors[0], right.factors[0]
    assert first.classes is not None
    assert second.classes is not None
    rows = (first.classes == row) & (first.masses > 0)
    columns = (second.classes == column) & (second.masses > 0)
    costs = factor_costs(first, second, cost, None)[rows][:, columns]
    truth = entropic_transport(costs, first.masses[rows], second.masses[columns], epsilon)
    # Weights are divided by their sum once more, in float64.
    return truth._replace(error=truth.error + 2.0**-52 * (truth.magnitude + epsilon))


def _halved(xy: Truth, xx: Truth, yy: Truth) -> Truth:
    return Truth(
        xy.value - (xx.value + yy.value) / 2,
        xy.error + (xx.error + yy.error) / 2 + 2.0**-53 * (xy.magnitude + xx.magnitude),
        xy.magnitude,
    )


def has_pairs(problem: Problem, settings: Settings) -> bool:
    """Whether classes are to be compared, and every class has points with mass."""
    if settings.route != "class_pairs" or problem.table is None or not problem.cost.lambda_x:
        return False
    for side in (problem.x, problem.y):
        classes = side.factors[0].classes
        if classes is None or len(side.factors) > 1:
            return False
        met = np.unique(classes[side.factors[0].masses > 0])
        if len(met) < side.samples.class_total:
            return False
    return True
