"""How wide the certified intervals are, and what they cost, on real pairs.

    python -m experiments.bench_bounds --data-root DIR [--samples 2000] [--device cpu]

MNIST against USPS and against Fashion-MNIST, pixels at 28 x 28, gaussian class distances, solved to
the default tolerance 1e-3. Every row holds

- the interval of the divergence, and the simple one that the marginal error, the oscillation of the
  potentials and the range of the cost give by themselves, with the same allowance for rounding;
- the divergence in double precision at a marginal error of 1e-7, whose own interval has to lie
  within the one that is measured: a row that fails this is refused;
- the share of the solve's time that the interval takes: the certificates' over that of the passes
  which the value and the marginal error need anyway.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.certified_solves import load_pair
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.point_scores import StoredScores
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.certificate import certify, certify_self
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import TransportTerm

PAIRS = (("mnist", "usps"), ("mnist", "fashion_mnist"))
# Multiples of the mean cost; None is epsilon = 0.1.
RELATIVE_EPSILONS = (1e-1, 1e-2, 1e-3, None)
PRECISIONS = ("fast", "double")
TRUE_ERROR = 1e-7
REPEATS = 5


def simple_bounds(terms: dict[str, TransportTerm], problem: Comparison) -> tuple[float, float]:
    """The interval of the divergence by the oscillation bound alone."""
    ends: dict[str, tuple[float, float]] = {}
    for name, term in terms.items():
        operator = problem.operator(name)
        support = term.g[operator.b > 0]
        reach = float(support.max() - support.min()) + operator.costs.spread
        share = 0.5 if name == "xy" else 1.0
        lower = term.bounds[0]
        upper = term.value + share * term.marginal_error * reach + (term.value - lower)
        ends[name] = lower, upper
    low, high = ends["xy"]
    return low - (ends["xx"][1] + ends["yy"][1]) / 2, high - (ends["xx"][0] + ends["yy"][0]) / 2


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a run; on a CPU the processor's, which other work does not disturb."""
    clock, times = time.perf_counter if device.type == "cuda" else time.process_time, []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - started)
    return statistics.median(times)


def interval_seconds(terms: dict[str, TransportTerm], problem: Comparison) -> float:
    """Time of the certificates of all terms over that of the passes without an interval."""
    total = 0.0
    for name, term in terms.items():
        operator: Operator = problem.operator(name).refined

        def passes(operator: Operator = operator, term: TransportTerm = term) -> None:
            f = operator.softmin_rows(term.g, term.epsilon, term.f)
            if term.f is not term.g:
                operator.softmin_columns(f, term.epsilon, term.g)

        def certificate(operator: Operator = operator, term: TransportTerm = term) -> None:
            if term.f is term.g:
                certify_self(operator, term.f, term.epsilon)
            else:
                certify(operator, term.f, term.g, term.epsilon)

        total += seconds(certificate, problem.device) - seconds(passes, problem.device)
    return total


def true_divergence(problem: Comparison, near: Divergence) -> Divergence:
    """The divergence in double precision, from potentials nearby."""
    start = {name: term.g.double() for name, term in near.terms.items()}
    start["xy"] = newton(problem.operator("xy"), start["xy"], near.xy.epsilon)
    options = otdd.Converged(tolerance=TRUE_ERROR, max_iterations=200_000)
    return solve(problem, options, start=start)


def newton(operator: Operator, g: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The column potential (m,) to a marginal error below 1e-7, by steps of Newton's method.

    With f = T(g), the dual has the gradient b - c in g and the Hessian (P^T diag(1 / a) P -
    diag(c)) / epsilon, singular along constants. Steps are halved until the dual rises.
    """
    assert isinstance(operator, TorchOperator)
    source = operator.source
    assert isinstance(source, StoredScores), "so many samples need their scores streamed"
    a, b, scores = operator.a, operator.b, source.scores

    def dual(g: torch.Tensor) -> float:
        return float(a @ operator.softmin_rows(g, epsilon) + b @ g)

    while True:
        f = operator.softmin_rows(g, epsilon) - source.row_offset
        conditional = ((f[:, None] + g[None, :] + scores) / epsilon).exp_() * b
        columns = a @ conditional
        if float((columns - b).abs().sum()) < TRUE_ERROR / 2:
            return g
        hessian = torch.diag(columns) - conditional.T @ (conditional * a[:, None])
        hessian.diagonal().add_(1e-12 * float(columns.max()))
        step, before = epsilon * torch.linalg.solve(hessian, b - columns), dual(g)
        step -= step.mean()
        while dual(g + step) < before - 1e-11 * abs(before):
            step /= 2
        g = operator.softmin_columns(operator.softmin_rows(g + step, epsilon), epsilon)


def measure(
    problem: Comparison, exact: Comparison, truth: Divergence | None
) -> tuple[dict[str, Any], Divergence]:
    """One row, and the divergence in double precision if it was not known."""
    found = solve(problem, otdd.Converged())
    truth = truth or true_divergence(exact, found)
    (low, high), (least, most) = found.bounds, truth.bounds
    if not (low <= least and most <= high and truth.converged):
        sys.exit(f"[{least}, {most}] is not within [{low}, {high}]")
    simple = simple_bounds(found.terms, problem)
    solved = seconds(lambda: solve(problem, otdd.Converged()), problem.device)
    extra = interval_seconds(found.terms, problem)
    row = {
        "value": found.value,
        "bounds": [low, high],
        "simple_bounds": list(simple),
        "true_bounds": [least, most],
        "ratio_of_widths": (high - low) / (simple[1] - simple[0]),
        "width_over_value": (high - low) / abs(found.value),
        "extra_time": extra / (solved - extra),
        "solve_seconds": solved,
        "passes": found.passes,
        "converged": found.converged,
    }
    return row, truth


def main() -> None:
    """Write bench_bounds_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for names in PAIRS:
        source, target, table = load_pair(names, given.data_root, given.samples, given.device)
        cost = otdd.GroundCost()
        asked = otdd.ComputeOptions(device=given.device)
        whole = Comparison.prepare((source, target), cost, asked)
        mean = whole.with_classes(table).mean_cost()
        for relative in RELATIVE_EPSILONS:
            epsilon = 0.1 if relative is None else relative * mean
            problems = {
                precision: Comparison.between(
                    source,
                    target,
                    epsilon,
                    table,
                    cost,
                    replace(asked, precision=precision),
                )
                for precision in PRECISIONS
            }
            truth = None
            for precision, problem in problems.items():
                row, truth = measure(problem, problems["double"], truth)
                setting = {"pair": ", ".join(names), "epsilon": epsilon, "precision": precision}
                rows.append({**setting, "epsilon_relative": relative, **row})
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
    summary = {
        "median_ratio_of_widths": statistics.median(row["ratio_of_widths"] for row in rows),
        "largest_width_over_value": max(row["width_over_value"] for row in rows),
        "median_extra_time": statistics.median(row["extra_time"] for row in rows),
        "largest_extra_time": max(row["extra_time"] for row in rows),
    }
    content = {
        "environment": environment(),
        "samples": given.samples,
        "tolerance": otdd.Converged().asked_tolerance,
        **summary,
        "rows": rows,
    }
    sys.stdout.write(
        f"{write_result(f'bench_bounds_{given.device}', content, given.output)}\n{summary}\n"
    )


if __name__ == "__main__":
    main()
