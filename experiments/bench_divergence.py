"""The label-augmented debiased divergence and its gradient on a GPU: ours and flash-sinkhorn's.

    python -m experiments.bench_divergence [--output DIR] [--again]

Random labelled clouds, ten classes a side. Both sides get the same tensors, epsilon and number of
iterations from zero potentials, and return the divergence, or the divergence and its gradient by x.
The whole call is timed: theirs with its centring and rounding, ours with its packing and with its
certificate in `high` precision, which theirs has no counterpart of. Medians of ten runs by CUDA
events after a warm-up that includes compilation and tuning.

Accuracy, from the potentials that either side ends with, in float64 or in our `high` precision:

- marginal error, the largest of the three terms': max(||r - a||_1, ||c - b||_1) of the final plan.
  A ratio counts only where ours is not larger.
- the gradient's error on 256 rows against float64 sums over the plan of the returned potentials.
  Ours is that gradient; theirs may be taken at other potentials: its number does not rank it.

Half-passes are sweeps over n x m scores for one potential, as if nothing were shared: theirs update
both potentials of every term, ours the one of a self term.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import extra_mib, milliseconds
from otdd_flash import Converged, NotConvergedWarning, sinkhorn_loss
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.gradient import DivergenceGradient
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.solving import solve

SIZES = ((60_000, 784), (60_000, 512), (20_000, 512), (5_000, 64), (2_000, 64), (1_000, 64))
ITERATIONS = 10
CLASSES = 10
RELATIVE_EPSILON = 0.01
CHECKED_ROWS = 256
# Of the largest coordinate: float16 rounding of plan and points, theirs is TF32.
GRADIENT_ACCURACY = 1e-3


@dataclass(frozen=True)
class Workload:
    """Two labelled clouds, the classes' distances, and epsilon."""

    x: Tensor
    y: Tensor
    labels_x: Tensor
    labels_y: Tensor
    table: Tensor
    epsilon: float

    @classmethod
    def draw(cls, n: int, d: int) -> Workload:
        """Gaussian clouds around ten means a side, n points each."""
        draw = torch.Generator("cuda").manual_seed(n + d)
        labels = [torch.randint(0, CLASSES, (n,), generator=draw, device="cuda") for _ in range(2)]
        means = torch.randn(2 * CLASSES, d, generator=draw, device="cuda")
        x, y = (
            means[side * CLASSES + labels[side]] + torch.randn(n, d, generator=draw, device="cuda")
            for side in range(2)
        )
        table = torch.cdist(means, means).square()
        mean_cost = (x - y[torch.randperm(n, generator=draw, device="cuda")]).square().sum(1).mean()
        return cls(x, y, labels[0], labels[1], table, RELATIVE_EPSILON * float(mean_cost))

    def problem(self, precision: str = "fast") -> Comparison:
        """The same for this package's solver."""
        names = tuple(map(str, range(CLASSES)))
        source = LabeledSamples(self.x, self.labels_x, names)
        target = LabeledSamples(self.y, self.labels_y, names)
        compute = ComputeOptions(device="cuda", precision=precision)
        return Comparison.between(source, target, self.epsilon, self.table, GroundCost(), compute)

    def ours(self, x: Tensor) -> Tensor:
        """The divergence by this package."""
        zeros = {name: torch.zeros(len(x), device="cuda") for name in ("xy", "xx", "yy")}
        return sinkhorn_loss(
            x,
            self.y,
            epsilon=self.epsilon,
            labels_x=self.labels_x,
            labels_y=self.labels_y,
            class_table=self.table,
            class_totals=(CLASSES, CLASSES),
            options=OPTIONS,
            start=zeros,
        )

    def theirs(self, x: Tensor) -> Tensor:
        """The divergence by flash-sinkhorn."""
        from flash_sinkhorn import SamplesLoss

        loss = SamplesLoss(
            use_epsilon_scaling=False,
            eps=self.epsilon,
            n_iters=ITERATIONS,
            debias=True,
            half_cost=True,
            label_cost_matrix=self.table,
            lambda_x=1.0,
            lambda_y=1.0,
        )
        value: Tensor = loss(
            x, self.y, label_x=self.labels_x.int(), label_y=self.labels_y.int() + CLASSES
        )
        return value


# The tolerance is what float32 allows and never reached: iterations stop at their number.
OPTIONS = Converged(tolerance=3e-5, max_iterations=ITERATIONS)


def our_solve(work: Workload) -> tuple[Divergence, Tensor]:
    """The terms, for their errors, and the gradient by x."""
    problem = work.problem()
    gradient = DivergenceGradient(problem, frozenset({"x"}))
    zeros = {name: torch.zeros(len(work.x), device="cuda") for name in ("xy", "xx", "yy")}
    divergence = solve(problem, OPTIONS, start=zeros, solved=gradient)
    return divergence, gradient.total["x"]


def their_potentials(work: Workload) -> dict[str, tuple[Tensor, Tensor]]:
    """What flash-sinkhorn's call ends with, term by term, by the solver that it calls."""
    from flash_sinkhorn.samples_loss import _center_coords, _round_to_tf32
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_symmetric

    masses = torch.full((len(work.x),), 1 / len(work.x), device="cuda")
    centred = _center_coords(work.x, work.y, masses, masses, batched=False)
    points = dict(zip("xy", map(_round_to_tf32, centred), strict=True))
    labels = {"x": work.labels_x.int(), "y": work.labels_y.int() + CLASSES}
    return {
        term: sinkhorn_flashstyle_symmetric(
            points[term[0]],
            points[term[1]],
            masses,
            masses,
            use_epsilon_scaling=False,
            eps=work.epsilon,
            n_iters=ITERATIONS,
            cost_scale=0.5,
            label_x=labels[term[0]],
            label_y=labels[term[1]],
            label_cost_matrix=work.table,
            lambda_x=1.0,
            lambda_y=1.0,
        )
        for term in ("xy", "xx", "yy")
    }


def marginal_error(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> float:
    """The larger L1 distance of the plan's marginals from the masses."""
    rows = ((f - operator.softmin_rows(g, epsilon)).double() / epsilon).expm1()
    columns = ((g - operator.softmin_columns(f, epsilon)).double() / epsilon).expm1()
    return max(float(operator.a @ rows.abs()), float(operator.b @ columns.abs()))


def gradient_error(
    work: Workload, got: Tensor, potentials: dict[str, tuple[Tensor, Tensor]]
) -> float:
    """Largest error on some rows, of the largest coordinate, against the same plans in float64."""
    rows = torch.arange(0, len(work.x), max(1, len(work.x) // CHECKED_ROWS), device="cuda")
    sides = {"x": (work.x, work.labels_x), "y": (work.y, work.labels_y + CLASSES)}
    x = work.x[rows].double()
    pulls = []
    for term in ("xy", "xx"):
        f, g = (potential.double() for potential in potentials[term])
        y, labels = sides[term[1]]
        y, n = y.double(), len(work.x)
        cost = torch.cdist(x, y).square() + work.table[work.labels_x[rows]][:, labels].double()
        plan = ((f[rows, None] + g - cost / 2) / work.epsilon).exp() / n
        pulls.append(plan.sum(1, keepdim=True) * x - plan @ y)
    expected = pulls[0] - pulls[1]
    error = (got[rows].double() * len(work.x) - expected).abs().max()
    return float(error / work.x.abs().max())


def with_gradient(call: Callable[[Tensor], Tensor], attached: Tensor) -> Tensor:
    """The gradient of a call by its points."""
    (gradient,) = torch.autograd.grad(call(attached), attached)
    return gradient


def bench(n: int, d: int) -> dict[str, Any]:
    """One row of the table."""
    work = Workload.draw(n, d)
    problem = work.problem("high")
    operators = {term: problem.operator(term) for term in ("xy", "xx", "yy")}
    solved, gradient = our_solve(work)
    potentials = {
        "ours": {term: (result.f, result.g) for term, result in solved.terms.items()},
        "flash_sinkhorn": their_potentials(work),
    }
    errors = {
        side: max(
            marginal_error(operators[term], *pair, work.epsilon) for term, pair in terms.items()
        )
        for side, terms in potentials.items()
    }
    del operators
    attached = work.x.clone().requires_grad_()
    their_gradient = with_gradient(work.theirs, attached)
    gradient_errors = {
        "ours": gradient_error(work, gradient, potentials["ours"]),
        "flash_sinkhorn": gradient_error(work, their_gradient, potentials["flash_sinkhorn"]),
    }
    if not gradient_errors["ours"] <= GRADIENT_ACCURACY:
        raise SystemExit(f"n={n}, d={d}: our gradient is off by {gradient_errors['ours']:.1e}")
    calls = {"ours": work.ours, "flash_sinkhorn": work.theirs}
    forwards = {name: partial(call, work.x) for name, call in calls.items()}
    backwards = {name: partial(with_gradient, call, attached) for name, call in calls.items()}
    forward = {name: milliseconds(run, warm_ups=1) for name, run in forwards.items()}
    both = {name: milliseconds(run, warm_ups=1) for name, run in backwards.items()}
    half_passes = {
        "ours": 2 * ITERATIONS + 2 * ITERATIONS,
        # A first and a last full update beside the iterations, of both potentials, in three terms.
        "flash_sinkhorn": 3 * 2 * (ITERATIONS + 2),
    }
    counts = errors["ours"] <= errors["flash_sinkhorn"]
    return {
        "n": n,
        "d": d,
        "classes": 2 * CLASSES,
        "iterations": ITERATIONS,
        "epsilon": work.epsilon,
        "forward_ms": forward,
        "forward_and_gradient_ms": both,
        "half_passes": half_passes,
        "ms_per_half_pass": {name: forward[name] / half_passes[name] for name in calls},
        "marginal_error": errors,
        "gradient_error": gradient_errors,
        "value": {name: float(run()) for name, run in forwards.items()},
        "extra_mib": {name: extra_mib(run) for name, run in forwards.items()},
        "extra_mib_with_gradient": {name: extra_mib(run) for name, run in backwards.items()},
        "ratio_counts": counts,
        "forward_ratio": forward["flash_sinkhorn"] / forward["ours"] if counts else None,
        "gradient_ratio": both["flash_sinkhorn"] / both["ours"] if counts else None,
    }


def main() -> None:
    """Write bench_divergence.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", NotConvergedWarning)
    packages = "torch", "triton", "flash-sinkhorn"
    rows = Rows(
        "bench_divergence", ("n", "d"), *packages, folder=arguments.output, again=arguments.again
    )
    for n, d in SIZES:
        if not rows.has(n=n, d=d):
            rows.add(bench(n, d))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
