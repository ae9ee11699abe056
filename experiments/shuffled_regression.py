"""Linear regression whose rows are shuffled, by a descent that leaves saddles behind.

    python -m experiments.shuffled_regression [--data CELLS.npz] [--seconds 500]

The experiment of Ye et al. 2026, arXiv:2602.03067 (Figures 4, 7 and H.4). Cells x (n, 5), centred
and of variance 1, targets x W* + noise in an order that is not known, and the loss
L(W) = OT_epsilon(x W, y) with the cost |.|^2. From random weights Adam goes on until the smallest
eigenvalue of the Hessian by W (25 x 25), measured every ten steps by a product with 25 directions,
is at least 0.001; then Newton's method with Armijo's rule, and Adam again should the eigenvalue
fall. It ends when the gradient is below 0.005 three times in a row.

A solve starts from the potential of the last one, moved on as it changed on the last step: that
took 3.8 times fewer iterations over 40 steps of Adam with 2,000 cells at epsilon 0.1, to 1e-3.
Between Adam's steps solves may end earlier (`--adam-tolerance`), but for the last steps and where
an eigenvalue is measured next: cells are some 64 deviations away, a solve of all of them takes 100
to 200 iterations to 1e-3, and 2,000 of them took 2.2 times as few to 1e-2. Of solves to 1e-3 alone
gradients scatter by some 0.05 where weights are near their end.

- ours: the first length that a Newton step tries is 10, then halved;
- unit: it is 1, which keeps Newton's quadratic convergence;
- damped: as ours, with tau I added to the linear systems of the Hessian, as in the paper;
- adam: Adam alone, no eigenvalue.

`CELLS.npz` holds an array `cells` (n, 5); without it 500 rows of Student's t distribution. A row
holds what was seen at every step (`experiments.regression.descent.Trace`), and its time includes
all eigenvalues but that of the end. Rows that are there are kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.regression.descent import Descent, Rules
from experiments.regression.picture import draw_descent
from experiments.regression.problem import Data, Loss, measured_cells, start, synthetic_cells
from experiments.rows import Rows

EPSILONS, SEEDS = (0.5, 0.25, 0.1), range(24)
FIRST_STEPS = {"ours": 10.0, "unit": 1.0, "damped": 10.0, "adam": None}
SYNTHETIC_CELLS = 500


def losses(data: Data, epsilon: float, given: argparse.Namespace) -> tuple[Loss, Loss]:
    """The loss as it is, and with the paper's damping."""
    precision = given.precision or ("double" if given.device == "cpu" else "fast")
    compute = otdd.ComputeOptions(device=given.device, precision=precision)
    options = otdd.Converged(tolerance=given.tolerance)
    # S + tau I, where masses are 1 / n each, is S + n tau diag(c).
    damping = given.damping * len(data.x)
    exact, damped = (
        Loss(data, epsilon, options, otdd.CGOptions(given.cg_tolerance, damping=delta), compute)
        for delta in (0.0, damping)
    )
    return exact, damped


def measure(
    method: str, seed: int, exact: Loss, damped: Loss, given: argparse.Namespace
) -> dict[str, Any]:
    """One row, less what says which it is."""
    loss = damped if method == "damped" else exact
    rules = Rules(given.max_steps, FIRST_STEPS[method], given.adam_tolerance)
    descent = Descent(loss, start(seed), rules)
    descent.run()
    found, trace = descent.point, descent.trace
    checks = trace.check_seconds
    return {
        **{"tolerance": loss.options.tolerance, "precision": loss.compute.precision},
        **{"cg_tolerance": loss.cg.tolerance, "damping": loss.cg.damping},
        "adam_tolerance": rules.adam_tolerance,
        **{"loss": found.loss, "gradient_norm": found.gradient_norm},
        "ended_by_gradient": trace.ended_by_gradient,
        # Without damping, whatever the descent had.
        "smallest_eigenvalue": exact.at(found.w, near=found).spectrum().smallest,
        **{"steps": len(trace.modes) - 1, "newton_steps": trace.modes.count("n")},
        **{"escapes": len(trace.escapes), "returns": len(trace.returns)},
        "off": loss.data.off(found.w),
        "seconds": trace.seconds[-1],
        "seconds_per_check": statistics.median(checks) if checks else None,
        "weights": found.w.flatten().tolist(),
        "trace": trace.compact(),
    }


def at_truth(loss: Loss) -> dict[str, float]:
    """What W* itself reaches; and the kernels are compiled before anything is timed."""
    point = loss.at(loss.data.truth)
    spectrum = point.spectrum()
    return {
        "loss": point.loss,
        "gradient_norm": point.gradient_norm,
        "smallest_eigenvalue": spectrum.smallest,
    }


def say(rows: list[dict[str, Any]]) -> None:
    """A line for each epsilon and method."""
    for epsilon, method in dict.fromkeys((row["epsilon"], row["method"]) for row in rows):
        seen = [row for row in rows if (row["epsilon"], row["method"]) == (epsilon, method)]
        newton = [row["newton_steps"] for row in seen if row["escapes"]]
        off = [row["off"] for row in seen]
        sys.stdout.write(
            f"epsilon {epsilon}, {method}: {len(seen)} starts, {len(newton)} escaped, "
            f"{sum(row['ended_by_gradient'] for row in seen)} ended by the gradient, "
            f"{statistics.median(newton) if newton else 0:g} Newton steps, "
            f"off by {min(off):.3f} to {max(off):.3f}, "
            f"{statistics.median(row['seconds'] for row in seen):.1f} s\n"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="an npz file with an array `cells` (n, 5)")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the starts")
    parser.add_argument("--methods", nargs="+", choices=FIRST_STEPS, default=["ours"])
    parser.add_argument("--damping", type=float, default=1e-5, help="the paper's tau")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="L1 marginal error of solves")
    parser.add_argument("--adam-tolerance", type=float, help="the same by default")
    parser.add_argument("--cg-tolerance", type=float, default=1e-4, help="residual of Hessians")
    parser.add_argument("--precision", help="double on a CPU and fast on a GPU by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    return parser.parse_args()


def main() -> None:
    """Write shuffled_regression.json and .png, or shuffled_regression_synthetic without data."""
    given, started = arguments(), time.perf_counter()
    name = f"shuffled_regression{'' if given.data else '_synthetic'}"
    cells = measured_cells(given.data) if given.data else synthetic_cells(SYNTHETIC_CELLS)
    data = Data.of(cells, device=given.device)
    keys = ("cells", "epsilon", "seed", "method")
    rows = Rows(name, keys, "torch", "triton", folder=given.output, again=given.again)
    known: dict[str, Any] = {"cells": len(cells), "device": given.device}
    found = {epsilon: losses(data, epsilon, given) for epsilon in given.epsilons}
    truths: dict[float, dict[str, float]] = {}
    for method, seed, epsilon in product(given.methods, given.seeds, given.epsilons):
        row = {**known, "epsilon": epsilon, "seed": seed, "method": method}
        if rows.has(**{key: row[key] for key in keys}):
            continue
        if time.perf_counter() - started > given.seconds:
            break
        exact, damped = found[epsilon]
        if epsilon not in truths:
            truths[epsilon] = at_truth(exact)
        row |= measure(method, seed, exact, damped, given)
        rows.add({**row, "at_truth": truths[epsilon]})
    say(rows.rows)
    escaped = [row for row in rows.rows if row["escapes"]]
    if escaped:
        draw_descent(escaped[0], given.output / f"{name}.png")


if __name__ == "__main__":
    main()
