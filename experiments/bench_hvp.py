"""Hessian products by the points, beside flash-sinkhorn: after Ye et al. 2026, Tables 14 and 15.

    python -m experiments.bench_hvp [--device cpu] [--sizes N ...] [--dimensions D ...]

n = m Gaussian points a side, uniform masses, the cost ||x - y||^2, epsilon a tenth of its mean
(arXiv:2602.03067). Medians of five calls after two, by the host's clock until all is there:

- product: one product without debiasing at given potentials, packing included, to 1e-4;
- again: the same once more, with what the first has prepared;
- debiased: as `product`, of the divergence;
- directions: 25 of them at once;
- end_to_end: clouds to product, with the solve to 1e-3 and its certificate;
- end_to_end_biased: the same without debiasing;
- flash_sinkhorn: `hvp_x_sqeuclid_from_potentials` at the same potentials, to 1e-4 and at its
  defaults, whose damping changes the product;
- flash_sinkhorn_end_to_end: its `SamplesLoss` without debiasing, ten iterations, differentiated
  twice, to 1e-4 without damping.

Errors are relative, against our own product in float64 at the same potentials, solved to 1e-9; a
product that is off by more than a hundredth is not timed. Where n is too large for float64 the
truth is `high` precision at 1e-7. Memory is the peak over what was there before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.hessian import DivergenceCurvature
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import Divergence

SIZES, DIMENSIONS = (5_000, 10_000, 50_000), (4, 64, 512)
RELATIVE_EPSILON, TOLERANCE, WORST = 0.1, 1e-4, 0.01
CALLS, WARM_UPS, DIRECTIONS, PEER_ITERATIONS = 5, 2, 25, 10
LARGEST_IN_DOUBLE = 10_000
COST = GroundCost(1.0, 1.0)


METHODS = (
    "product", "again", "debiased", "directions", "end_to_end", "end_to_end_biased",
    "flash_sinkhorn", "flash_sinkhorn_default", "flash_sinkhorn_end_to_end",
)  # fmt: skip


class Work:
    """Two clouds and the solved terms between them."""

    def __init__(self, n: int, d: int, device: str) -> None:
        draw = torch.Generator().manual_seed(0)
        x, y, v = (torch.randn(n, d, generator=draw).to(device) for _ in range(3))
        self.x, self.y, self.v, self.device = x, y + 0.5, v, device
        self.epsilon = RELATIVE_EPSILON * (2 * d + 0.25 * d)
        self.directions = torch.randn(DIRECTIONS, n, d, generator=draw).to(device)
        self.divergence = self.hessian().divergence

    def hessian(self, *, debias: bool = True) -> otdd.SinkhornHessian:
        """From the clouds."""
        cg = otdd.CGOptions(TOLERANCE)
        return otdd.sinkhorn_hessian(
            self.x, self.y, epsilon=self.epsilon, lambda_x=1.0, debias=debias, cg=cg
        )

    def curvature(self, precision: str, tolerance: float, *, debias: bool) -> DivergenceCurvature:
        """At the potentials of the solve."""
        compute = otdd.ComputeOptions(self.device, precision=precision)
        x, y = (side.double() if precision == "double" else side for side in (self.x, self.y))
        problem = Comparison.between(x, y, self.epsilon, None, COST, compute, debias=debias)
        terms = self.divergence.terms if debias else {"xy": self.divergence.xy}
        dtype = compute.dtype
        cast = {
            name: replace(term, f=term.f.to(dtype), g=term.g.to(dtype))
            for name, term in terms.items()
        }
        found = Divergence(cast["xy"], cast.get("xx"), cast.get("yy"), "", self.device, passes=0.0)
        return DivergenceCurvature(problem, found, otdd.CGOptions(tolerance))

    def truth(self, *, debias: bool) -> Tensor:
        """The product, to many digits."""
        small = len(self.x) <= LARGEST_IN_DOUBLE
        curvature = self.curvature(
            "double" if small else "high", 1e-9 if small else 1e-7, debias=debias
        )
        return curvature.along(self.v[None].double(), None).x[0]

    def theirs(self, **settings: Any) -> Tensor:
        """By flash-sinkhorn, whose potentials hold the masses."""
        from flash_sinkhorn.hvp import hvp_x_sqeuclid_from_potentials

        shift = self.epsilon * torch.log(torch.tensor(1 / len(self.x)))
        f, g = (
            potential.float() + shift for potential in (self.divergence.xy.f, self.divergence.xy.g)
        )
        product, _ = hvp_x_sqeuclid_from_potentials(
            self.x, self.y, f, g, self.v, eps=self.epsilon, cost_scale=1.0, **settings
        )
        found: Tensor = product
        return found

    def theirs_end_to_end(self) -> Tensor:
        """By flash-sinkhorn from the clouds."""
        from flash_sinkhorn import SamplesLoss

        loss = SamplesLoss(
            use_epsilon_scaling=False,
            eps=self.epsilon,
            n_iters=PEER_ITERATIONS,
            hvp_tau2=0.0,
            hvp_cg_rtol=TOLERANCE,
            hvp_cg_atol=0.0,
        )
        x = self.x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x, self.y), x, create_graph=True)
        (product,) = torch.autograd.grad(gradient, x, self.v)
        return product


def timed(call: Callable[[], Any], device: str) -> tuple[float, float | None, Any]:
    """Median milliseconds, the peak of memory in MiB, and what came of the last call."""
    cuda, times, found = device == "cuda", [], None
    gc.collect()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UPS + CALLS):
        found = None
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        found = call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
    return statistics.median(times[WARM_UPS:]), peak, found


class Products:
    """What computes a product of some work: name -> call, and whether it is debiased."""

    def __init__(self, work: Work) -> None:
        one = work.v[None].double()
        # The first of them is the one whose product is known.
        many = torch.cat((one, work.directions[1:].double()))

        def along(directions: Tensor, *, debias: bool) -> Tensor:
            return work.curvature("fast", TOLERANCE, debias=debias).along(directions, None).x[0]

        self._kept: DivergenceCurvature | None = None

        def again() -> Tensor:
            if self._kept is None:
                self._kept = work.curvature("fast", TOLERANCE, debias=False)
            return self._kept.along(one, None).x[0]

        self.calls: dict[str, tuple[Callable[[], Tensor], bool]] = {
            "product": (lambda: along(one, debias=False), False),
            "again": (again, False),
            "debiased": (lambda: along(one, debias=True), True),
            "directions": (lambda: along(many, debias=False), False),
            "end_to_end": (lambda: work.hessian().product(work.v).values, True),
            "end_to_end_biased": (lambda: work.hessian(debias=False).product(work.v).values, False),
            "flash_sinkhorn": (
                lambda: work.theirs(cg_rtol=TOLERANCE, cg_atol=0.0, tau2=0.0),
                False,
            ),
            "flash_sinkhorn_default": (lambda: work.theirs(), False),
            "flash_sinkhorn_end_to_end": (work.theirs_end_to_end, False),
        }


def bench(call: Callable[[], Tensor], truth: Tensor, device: str) -> dict[str, Any]:
    """The entries of one row."""
    try:
        milliseconds, peak, found = timed(call, device)
    # A peer may fail in any way, and the other rows are still wanted.
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    off = float((found.double() - truth).norm() / truth.norm())
    right = {"ms": milliseconds, "peak_mib": peak} if off <= WORST else {}
    return {"relative_error": off, **right}


def main() -> None:
    """Write bench_hvp_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dimensions", type=int, nargs="+", default=DIMENSIONS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    given = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    rows = Rows(
        f"bench_hvp_{given.device}",
        ("method", "n", "d"),
        *("torch", "triton", "flash-sinkhorn"),
        folder=given.output,
        again=given.again,
    )
    for n, d in product(given.sizes, given.dimensions):
        left = [name for name in given.methods if not rows.has(method=name, n=n, d=d)]
        if not left:
            continue
        work = Work(n, d, given.device)
        calls = Products(work).calls
        truths = {debias: work.truth(debias=debias) for debias in {calls[name][1] for name in left}}
        for name in left:
            call, debias = calls[name]
            row = {"method": name, "n": n, "d": d, "epsilon": work.epsilon}
            rows.add({**row, "device": given.device, **bench(call, truths[debias], given.device)})


if __name__ == "__main__":
    main()
