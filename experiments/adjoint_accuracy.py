"""How near gradients of balanced matrices are to those of the solution, by the iterations made.

    python -m experiments.adjoint_accuracy [--output DIR]

Matrices n x n of logits uniform in (0, range), stopped after some iterations, normal cotangents.
The largest error of any of 64, against the gradient of the solution in float64:

- unrolled: autograd through the iterations made;
- implicit: the linear system with the sums that the plan has, in float64 and in float32;
- ones: the system with the sums that it is to have, 1, by a pseudo-inverse.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bench_adjoint import balanced
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.batched.adjoint import plan_gradient

CASES = ((4, 4.0), (4, 8.0), (16, 4.0), (16, 8.0))
ITERATIONS, ENOUGH, COUNT = (1, 2, 5, 10, 20, 50, 100), 20_000, 64
# Colours that all common colour blindnesses tell apart (Okabe & Ito), and markers beside them.
LINES = {
    "unrolled": ("#0072B2", "o"),
    "implicit": ("#E69F00", "s"),
    "implicit_float32": ("#56B4E9", "^"),
    "ones": ("#000000", "x"),
}


def through(logits: Tensor, cotangents: Tensor, iterations: int) -> Tensor:
    """Autograd through the iterations."""
    leaf = logits.clone().requires_grad_()
    result = (balanced(leaf, iterations) * cotangents).sum()
    (found,) = torch.autograd.grad(result, leaf)
    return found


def solution(logits: Tensor, cotangents: Tensor) -> Tensor:
    """The gradient at the solution, by the system in float64 where it is exact."""
    return plan_gradient(balanced(logits, ENOUGH), cotangents, in_triton=False)


def with_ones(plans: Tensor, cotangents: Tensor) -> Tensor:
    """By the system with 1 for all sums."""
    n = plans.shape[1]
    ones = torch.eye(n, dtype=plans.dtype).expand(len(plans), n, n)
    matrices = torch.cat((torch.cat((ones, plans), 2), torch.cat((plans.mT, ones), 2)), 1)
    weighted = plans * cotangents
    right = torch.cat((weighted.sum(2), weighted.sum(1)), 1)[..., None]
    found: Tensor = (torch.linalg.pinv(matrices, rtol=1e-10, hermitian=True) @ right)[..., 0]
    return weighted - plans * (found[:, :n, None] + found[:, None, n:])


def measured(n: int, spread: float) -> list[dict[str, Any]]:
    """A row for every number of iterations."""
    draw = torch.Generator().manual_seed(0)
    logits = spread * torch.rand(COUNT, n, n, generator=draw, dtype=torch.float64)
    g = torch.randn(COUNT, n, n, generator=draw, dtype=torch.float64)
    truth, rows = solution(logits, g), []
    for iterations in ITERATIONS:
        plans = balanced(logits, iterations)
        found = {
            "unrolled": through(logits, g, iterations),
            "implicit": plan_gradient(plans, g, in_triton=False),
            "implicit_float32": plan_gradient(plans.float(), g.float(), in_triton=False),
            "ones": with_ones(plans, g),
        }
        row: dict[str, Any] = {"n": n, "range": spread, "iterations": iterations}
        row["row_error"] = float((plans.sum(2) - 1).abs().max())
        rows.append(row | {name: float((part - truth).abs().max()) for name, part in found.items()})
    return rows


def draw_picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Errors against iterations."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CASES), figsize=(13, 3.6), sharey=True)
    for axis, (n, spread) in zip(axes, CASES, strict=True):
        here = [row for row in rows if (row["n"], row["range"]) == (n, spread)]
        for name, (color, marker) in LINES.items():
            label = {"ones": "implicit, as if all sums were 1"}.get(name, name.replace("_", ", "))
            along = [row["iterations"] for row in here], [row[name] for row in here]
            axis.loglog(*along, label=label, color=color, marker=marker, markersize=4)
        axis.set(title=f"{n} x {n}, logits in (0, {spread:g})", xlabel="iterations")
    axes[0].set_ylabel("largest error of the gradient")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(LINES), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Write adjoint_accuracy.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = [row for case in CASES for row in measured(*case)]
    content = {"environment": environment("torch"), "matrices": COUNT, "rows": rows}
    path = write_result("adjoint_accuracy", content, given.output)
    draw_picture(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
