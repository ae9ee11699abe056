"""One divergence, three ways to compute it: ours, dense PyTorch, and geomloss with a dense cost.

Each takes the same clouds, table and epsilon, makes ten iterations of every term, and returns the
value, the gradient by x if asked, and the potentials that it ended with.

- ours: alternating updates of the cross term, averaged ones of both self terms, and a certificate
  at the end. A term stops early at a marginal error of 3e-5, about what float32 allows.
- tensorized: the same updates and stops in plain PyTorch, float32, on a dense n x m cost, one term
  at a time; then the dual value, differentiated by autograd with the potentials held still.
- geomloss, tensorized: averaged updates of all potentials, with a first and a last one beside the
  ten, while its epsilon falls from the mean cost to the epsilon that was asked for.

Half-passes are updates or sums over n x m scores for one potential; the gradient of a term counts
as one more. Ours and the tensorized go on from potentials that they are given, geomloss cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bench_divergence import marginal_error
from otdd_flash import ComputeOptions, Converged, LabeledSamples
from otdd_flash.derivatives.gradient import DivergenceGradient
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.solving import solve

ITERATIONS = 10
TERMS = ("xy", "xx", "yy")
# Its certificate is one iteration more, which updates f alone.
OPTIONS = Converged(tolerance=3e-5, max_iterations=ITERATIONS + 1)
# Of geomloss, all potentials: its iterations, the one that starts them and the one that ends them.
GEOMLOSS_UPDATES = ITERATIONS + 2

# f (n,) and g (m,) of "xy", "xx" and "yy".
Potentials = dict[str, tuple[Tensor, Tensor]]


class Solved(NamedTuple):
    """What a side returns.

    Attributes:
        value: S_epsilon, from its potentials.
        gradient: by x (n, d), or None.
        potentials: by term; geomloss shows none, see `geomloss_potentials`.
        half_passes: see above.
    """

    value: float
    gradient: Tensor | None
    potentials: Potentials
    half_passes: float


@dataclass(frozen=True, eq=False)
class Workload:
    """Two clouds on one device, W (V_x + V_y, V_x + V_y), epsilon, and the mean cost."""

    source: LabeledSamples
    target: LabeledSamples
    table: Tensor
    epsilon: float
    mean_cost: float

    def problem(self, x: Tensor, precision: str = "fast") -> Comparison:
        """This package's problem with the source's points moved to x (n, d)."""
        compute = ComputeOptions(device=str(x.device), precision=precision)
        moved = replace(self.source, features=x)
        return Comparison.between(moved, self.target, self.epsilon, self.table, compute=compute)

    def sides(self, term: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The points of a term; x as a second argument is held still by autograd."""
        y = self.target.features
        return x if term[0] == "x" else y, x.detach() if term[1] == "x" else y

    def labels(self, term: str) -> tuple[Tensor, Tensor] | None:
        """The classes of a term, numbered through both datasets."""
        if self.source.labels is None or self.target.labels is None:
            return None
        numbered = {"x": self.source.labels, "y": self.target.labels + self.source.class_total}
        return numbered[term[0]], numbered[term[1]]


# solve(work, x, start, differentiate): `start` holds potentials to go on from, None is zeros.
Side = Callable[[Workload, Tensor, Potentials | None, bool], Solved]


def solve_ours(work: Workload, x: Tensor, start: Potentials | None, differentiate: bool) -> Solved:
    """By this package."""
    problem = work.problem(x)
    gradient = DivergenceGradient(problem, frozenset({"x"})) if differentiate else None
    if start is None:
        columns = {term: len(work.sides(term, x)[1]) for term in TERMS}
        known = {term: torch.zeros(size, device=x.device) for term, size in columns.items()}
    else:
        known = {term: g for term, (_, g) in start.items()}
    divergence = solve(problem, OPTIONS, start=known, solved=gradient)
    return Solved(
        divergence.value,
        None if gradient is None else gradient.total["x"],
        {name: (term.f, term.g) for name, term in divergence.terms.items()},
        divergence.passes + (2 if differentiate else 0),
    )


def solve_tensorized(
    work: Workload, x: Tensor, start: Potentials | None, differentiate: bool
) -> Solved:
    """By plain PyTorch on a dense cost."""
    x = x.detach().requires_grad_(differentiate)
    xy, xx, yy = (_dense_term(work, term, x, start) for term in TERMS)
    gradient = None
    if xy.gradient is not None and xx.gradient is not None:
        # Autograd saw one of the self term's two arguments, whose parts are equal.
        gradient = xy.gradient - xx.gradient
    return Solved(
        xy.value - (xx.value + yy.value) / 2,
        gradient,
        dict(zip(TERMS, (xy.potentials, xx.potentials, yy.potentials), strict=True)),
        xy.half_passes + xx.half_passes + yy.half_passes,
    )


def solve_geomloss(
    work: Workload, x: Tensor, start: Potentials | None, differentiate: bool
) -> Solved:
    """By geomloss; `start` is not used."""
    x = x.detach().requires_grad_(differentiate)
    # A context, because geomloss switches autograd off and on by itself.
    with torch.set_grad_enabled(differentiate):
        value = _geomloss(work)(*_with_classes(work, "xy", x, work.target.features))
        gradient = torch.autograd.grad(value, x)[0] if differentiate else None
    half_passes = 4 * GEOMLOSS_UPDATES + (2 if differentiate else 0)
    return Solved(float(value.detach()), gradient, {}, half_passes)


def geomloss_potentials(work: Workload, x: Tensor) -> Potentials:
    """What `solve_geomloss` ends with: of a term alone its updates are the same."""
    potentials = {}
    with torch.no_grad():
        for term in TERMS:
            points = _with_classes(work, term, *work.sides(term, x))
            f, g = _geomloss(work, debias=False, potentials=True)(*points)
            potentials[term] = f.flatten(), g.flatten()
    return potentials


def marginal_errors(work: Workload, x: Tensor, potentials: Potentials) -> dict[str, float]:
    """max(||r - a||_1, ||c - b||_1) of each term's plan, as our `high` operators measure it."""
    problem = work.problem(x, "high")
    return {
        term: marginal_error(problem.operator(term), *potentials[term], work.epsilon)
        for term in TERMS
    }


def dense_cost(x: Tensor, y: Tensor, table: Tensor, labels: tuple[Tensor, Tensor] | None) -> Tensor:
    """C_ij = (||x_i - y_j||^2 + W[l_i, l_j]) / 2, shape (n, m), without a second matrix."""
    cost = torch.addmm(y.square().sum(1), x, y.T, beta=0.5, alpha=-1)
    cost.add_(x.square().sum(1, keepdim=True), alpha=0.5)
    if labels is not None:
        # W[l_i, l_j] as a product with indicators, exact in float32.
        of_y = torch.nn.functional.one_hot(labels[1], len(table)).to(cost.dtype)
        cost.addmm_(table.to(cost)[labels[0]], of_y.T, alpha=0.5)
    return cost


class _DenseTerm(NamedTuple):
    value: float
    gradient: Tensor | None
    potentials: tuple[Tensor, Tensor]
    half_passes: int


def _dense_term(work: Workload, term: str, x: Tensor, start: Potentials | None) -> _DenseTerm:
    """One term, with the derivative by its first argument where that is an x that wants one."""
    cost = dense_cost(*work.sides(term, x), work.table, work.labels(term))
    n, m = cost.shape
    zeros = cost.new_zeros(n), cost.new_zeros(m)
    with torch.no_grad():
        iterate = _alternate if term == "xy" else _average
        f, g, half_passes = iterate(cost, work.epsilon, zeros if start is None else start[term])
    value = _dual(cost, f, g, work.epsilon)
    half_passes += 1
    if not cost.requires_grad:
        return _DenseTerm(float(value), None, (f, g), half_passes)
    (gradient,) = torch.autograd.grad(value, x)
    return _DenseTerm(float(value.detach()), gradient, (f, g), half_passes + 1)


def _alternate(
    cost: Tensor, epsilon: float, start: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, int]:
    (f, g), half_passes = start, 0
    for _ in range(ITERATIONS):
        f = _softmin(cost, g, epsilon, 1)
        before, g = g, _softmin(cost, f, epsilon, 0)
        half_passes += 2
        if _gap(before, g, epsilon) <= OPTIONS.asked_tolerance:
            break
    return f, g, half_passes


def _average(
    cost: Tensor, epsilon: float, start: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, int]:
    (f, _), half_passes = start, 0
    for _ in range(ITERATIONS):
        before, softmin = f, _softmin(cost, f, epsilon, 1)
        f = (before + softmin) / 2
        half_passes += 1
        if _gap(before, softmin, epsilon) <= OPTIONS.asked_tolerance:
            break
    return f, f, half_passes


def _gap(before: Tensor, softmin: Tensor, epsilon: float) -> float:
    """L1 distance from the masses of the marginal of the plan before an update."""
    return float(((before - softmin) / epsilon).expm1().abs().mean())


def _softmin(cost: Tensor, potential: Tensor, epsilon: float, along: int) -> Tensor:
    """-epsilon log mean exp((potential - C) / epsilon), the mean along a dimension of C."""
    scores = cost.mul(-1 / epsilon).add_(potential.unsqueeze(1 - along) / epsilon)
    return -epsilon * (scores.logsumexp(along) - math.log(cost.shape[along]))


def _dual(cost: Tensor, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
    """<a, f> + <b, g> + epsilon (1 - sum P)."""
    scores = cost.mul(-1 / epsilon).add_(f.unsqueeze(1) / epsilon).add_(g / epsilon)
    return f.mean() + g.mean() + epsilon * (1 - scores.exp_().mean())


def _geomloss(work: Workload, **options: Any) -> Any:
    """The loss, with a schedule of `ITERATIONS` epsilons and, with classes, our dense cost."""
    from geomloss import SamplesLoss

    blur, diameter = math.sqrt(work.epsilon), math.sqrt(work.mean_cost)
    # Its schedule holds both ends and, from the upper one, all powers above the lower one: the half
    # keeps rounding from changing their number.
    scaling = (blur / diameter) ** (1 / (ITERATIONS - 2.5))
    return SamplesLoss(
        "sinkhorn",
        p=2,
        blur=blur,
        diameter=diameter,
        scaling=scaling,
        cost=None if work.labels("xy") is None else _ClassCost(work.table),
        backend="tensorized",
        **options,
    )


@dataclass(frozen=True, eq=False)
class _ClassCost:
    """The cost between points (1, n, d + 1) and (1, m, d + 1) whose last column is the class."""

    table: Tensor

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.squeeze(0), y.squeeze(0)
        labels = x[:, -1].long(), y[:, -1].long()
        return dense_cost(x[:, :-1], y[:, :-1], self.table, labels).unsqueeze(0)


def _with_classes(work: Workload, term: str, *points: Tensor) -> list[Tensor]:
    labels = work.labels(term)
    if labels is None:
        return list(points)
    pairs = zip(points, labels, strict=True)
    return [torch.cat((side, classes.to(side).unsqueeze(1)), 1) for side, classes in pairs]
