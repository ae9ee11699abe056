"""Hessian products against a dense pseudo-inverse: the problem of Ye et al. 2026, Table 13.

    python -m experiments.hvp_parity [--device cuda] [--output DIR]

n = m = 512 normal points in 4 dimensions, random masses, the cost ||x - y||^2, float32, at three
epsilons (arXiv:2602.03067). The truth is the product at the potentials that the solve returned,
from a dense plan in float64 and the pseudo-inverse of the whole system of both potentials. A row
holds the relative error of a product, ||T A - truth|| / ||truth||, the median of ten directions: of
systems that are decomposed, as those of so few points are, and, as of more points, at the default
tolerance of conjugate gradients and at 1e-6; with damping tau n, tau = 1e-5, which is what tau on
the diagonal comes to at masses of 1 / n, and with debiasing.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.derivatives import plan_system

POINTS, DIM, DIRECTIONS, EPSILONS, TAU = 512, 4, 10, (0.1, 0.25, 0.5), 1e-5
DECOMPOSED = "decomposed"
METHODS: dict[str, dict[str, Any]] = {
    DECOMPOSED: {},
    "default": {},
    "tolerance 1e-6": {"tolerance": 1e-6},
    "damped": {"damping": TAU * POINTS},
}
MOST_POINTS = plan_system.MOST_POINTS
# Of the cost ||x - y||^2.
FACTOR = 2.0


def truth(plan: Tensor, x: Tensor, y: Tensor, directions: Tensor, epsilon: float) -> Tensor:
    """How the gradient by x changes along each of the directions (s, n, d), y standing still."""
    r, c, n = plan.sum(1), plan.sum(0), len(plan)
    top, bottom = torch.cat((r.diag(), plan), 1), torch.cat((plan.T, c.diag()), 1)
    inverse = torch.linalg.pinv(torch.cat((top, bottom)), rtol=1e-13, hermitian=True)
    found = []
    for a in directions:
        change = FACTOR * ((x * a).sum(1)[:, None] - a @ y.T)
        weighted = plan * change
        w = inverse @ torch.cat((weighted.sum(1), weighted.sum(0)))
        moved = (plan * (w[:n, None] + w[None, n:]) - weighted) / epsilon
        found.append(FACTOR * (r[:, None] * a - moved @ y))
    return torch.stack(found)


def own_truth(plan: Tensor, x: Tensor, directions: Tensor, epsilon: float) -> Tensor:
    """Likewise of a self term, both of whose arguments move."""
    r, found = plan.sum(1), []
    for a in directions:
        change = FACTOR * ((x * a).sum(1)[:, None] + (x * a).sum(1)[None] - a @ x.T - x @ a.T)
        weighted = plan * change
        w = torch.linalg.solve(r.diag() + plan, weighted.sum(1))
        moved = (plan * (w[:, None] + w[None]) - weighted) / epsilon
        found.append(2 * FACTOR * (r[:, None] * a - plan @ a - moved @ x))
    return torch.stack(found)


def dense_plan(term: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The plan of the potentials of a term, float64."""
    cost = (x[:, None] - y[None]).square().sum(2)
    f, g = term.f.double(), term.g.double()
    exponent = (f[:, None] + g[None] - cost) / term.epsilon
    plan: Tensor = a[:, None] * b[None] * exponent.exp()
    return plan


def measure(epsilon: float, device: str) -> list[dict[str, Any]]:
    """All rows of one epsilon."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(POINTS, DIM, generator=draw) for _ in range(2))
    a, b = (torch.rand(POINTS, generator=draw) + 0.1 for _ in range(2))
    a, b = ((part.double() / part.double().sum()).to(device) for part in (a, b))
    x, y, v = (
        points.to(device) for points in (x, y, torch.randn(DIRECTIONS, POINTS, DIM, generator=draw))
    )
    of_x, of_y, of_v = (part.double() for part in (x, y, v))
    rows = []
    for debias in (False, True):
        expected = None
        for name, cg in METHODS.items():
            options = otdd.CGOptions(**cg)
            hessian = otdd.sinkhorn_hessian(
                x, y, a, b, epsilon=epsilon, lambda_x=1.0, debias=debias, cg=options
            )
            if expected is None:
                plan = dense_plan(hessian.divergence.xy, of_x, of_y, a, b)
                expected = truth(plan, of_x, of_y, of_v, epsilon)
                if hessian.divergence.xx is not None:
                    plan = dense_plan(hessian.divergence.xx, of_x, of_x, a, a)
                    expected -= own_truth(plan, of_x, of_v, epsilon) / 2
            plan_system.MOST_POINTS = MOST_POINTS if name == DECOMPOSED else 0
            product = hessian.product(v)
            errors = (product.values - expected).flatten(1).norm(dim=1)
            relative = errors / expected.flatten(1).norm(dim=1)
            rows.append(
                {
                    "epsilon": epsilon,
                    "debias": debias,
                    "method": name,
                    "relative_error": float(relative.median()),
                    "largest_error": float(relative.max()),
                    "iterations": float(product.iterations.double().mean()),
                    "residual": float(product.residual.max()),
                    "converged": bool(product.converged.all()),
                    "backend": hessian.divergence.backend,
                }
            )
    return rows


def main() -> None:
    """Write hvp_parity.json, or hvp_parity_cuda.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.simplefilter("error", otdd.NotConvergedWarning)
    rows = [row for epsilon in EPSILONS for row in measure(epsilon, given.device)]
    name = "hvp_parity" if given.device == "cpu" else "hvp_parity_cuda"
    write_result(name, {"environment": environment("torch", "triton"), "rows": rows}, given.output)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
