"""Relaxed marginals beside other packages, at the same epsilon and rho.

    python -m experiments.bench_unbalanced --device cpu [--sizes N ...]
    python -m experiments.bench_unbalanced --device cuda [--sizes N ...]

Half of the target's points lie where the source has none. `divergence` is the debiased divergence
of points in 64 dimensions, its cost ||x - y||^2 / 2, epsilon 0.1 and rho 0.3 of the mean cost:
ours to a marginal error of 1e-3, certified, beside geomloss (`reach`, `blur`, scaling 0.9) and, on
a GPU, flash-sinkhorn (`reach`, ten iterations). `term` is one transport from a cost matrix beside
POT's stabilized `sinkhorn_unbalanced`, whose value is evaluated by our formula from its plan.

Medians of calls that get points they have not seen, until the number is on the host. `off` is the
relative distance from our value, which is in double precision up to 4,000 points; what is off by
more than ALLOWED is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ot
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

SIZES = {"cpu": (200, 1000, 4000), "cuda": (1000, 10_000, 50_000)}
DIM, EPSILON, RHO = 64, 0.1, 0.3
# The most points of which others store costs; up to the first we solve in double precision.
MOST_STORED = {"cpu": 4000, "cuda": 10_000}
CALLS, WARM_UPS, ALLOWED = 5, 2, 0.05

Value = Callable[[Tensor, Tensor, float, float], Any]


def clouds(n: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw both sides; half of the target is shifted away."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, DIM, generator=draw) for _ in range(2))
    y[n // 2 :] += 1.5
    return x.to(device), y.to(device)


def ours(x: Tensor, y: Tensor, epsilon: float, rho: float) -> Tensor:
    """Our certified divergence."""
    return otdd.sinkhorn_loss(x, y, epsilon=epsilon, unbalanced=rho, compute=x.device.type)


def geomloss(x: Tensor, y: Tensor, epsilon: float, rho: float) -> Tensor:
    """The divergence of geomloss."""
    from geomloss import SamplesLoss

    options = {"p": 2, "blur": epsilon**0.5, "reach": rho**0.5, "scaling": 0.9}
    value: Tensor = SamplesLoss("sinkhorn", backend="tensorized", **options)(x, y)
    return value


def flash_sinkhorn(x: Tensor, y: Tensor, epsilon: float, rho: float) -> Tensor:
    """The divergence of flash-sinkhorn."""
    from flash_sinkhorn import SamplesLoss

    options = {"eps": epsilon, "reach": rho**0.5, "half_cost": True, "n_iters": 10}
    loss = SamplesLoss("sinkhorn", debias=True, use_epsilon_scaling=False, **options)
    value: Tensor = loss(x, y)
    return value


def our_term(x: Tensor, y: Tensor, epsilon: float, rho: float) -> Tensor:
    """Our certified value of one transport of a cost matrix."""
    value: Tensor = otdd.matrix_loss(costs(x, y), epsilon=epsilon, unbalanced=rho)
    return value


def pot(x: Tensor, y: Tensor, epsilon: float, rho: float) -> Tensor:
    """POT's plan, and the value of the objective at it."""
    cost = costs(x, y)
    a, b = (cost.new_full((size,), 1 / size) for size in cost.shape)
    options = {"method": "sinkhorn_stabilized", "reg_type": "kl", "stopThr": 1e-4}
    plan = ot.unbalanced.sinkhorn_unbalanced(a, b, cost, epsilon, rho, **options)
    marginals = _divergence(plan.sum(1), a) + _divergence(plan.sum(0), b)
    independent = a[:, None] * b
    value: Tensor = (plan * cost).sum() + epsilon * _divergence(plan, independent)
    return value + rho * marginals


def costs(x: Tensor, y: Tensor) -> Tensor:
    """Return the costs (n, m)."""
    return torch.cdist(x, y).square() / 2


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p | q) of masses that need not sum to 1."""
    return (torch.xlogy(p, p / q) - p + q).sum()


METHODS: dict[str, dict[str, Value]] = {
    "divergence": {"ours": ours, "geomloss": geomloss, "flash_sinkhorn": flash_sinkhorn},
    "term": {"ours": our_term, "POT": pot},
}


def truth(kind: str, x: Tensor, y: Tensor, epsilon: float, rho: float) -> float:
    """Compute our value, in double precision where that is quick."""
    if len(x) <= MOST_STORED["cpu"]:
        x, y = x.double(), y.double()
    return float(METHODS[kind]["ours"](x, y, epsilon, rho))


def measured(kind: str, method: str, n: int, device: str) -> dict[str, Any]:
    """Return the entries of a row."""
    times, off, value = [], 0.0, 0.0
    for seed in range(WARM_UPS + CALLS):
        x, y = clouds(n, seed, device)
        lengths = x.square().sum(1).mean() + y.square().sum(1).mean()
        mean = float(lengths / 2 - x.mean(0) @ y.mean(0))
        epsilon, rho = EPSILON * mean, RHO * mean
        started = time.perf_counter()
        value = float(METHODS[kind][method](x, y, epsilon, rho))
        times.append(time.perf_counter() - started)
        if seed == 0:
            off = abs(value / truth(kind, x, y, epsilon, rho) - 1)
    timed = {"ms": 1e3 * statistics.median(times[WARM_UPS:])} if off <= ALLOWED else {}
    return {"value": value, "off": off, **timed}


def main() -> None:
    """Write bench_unbalanced_cpu.json or bench_unbalanced_cuda.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    keys, packages = ("kind", "method", "n"), ("torch", "geomloss", "flash-sinkhorn", "POT")
    name = f"bench_unbalanced_{given.device}"
    rows = Rows(name, keys, *packages, folder=given.output, again=given.again)
    for n in given.sizes or SIZES[given.device]:
        for kind, methods in METHODS.items():
            for method in methods:
                key = {"kind": kind, "method": method, "n": n}
                stores = kind == "term" or method == "geomloss"
                if stores and n > MOST_STORED[given.device]:
                    continue
                if method == "flash_sinkhorn" and given.device == "cpu":
                    continue
                if not rows.has(**key):
                    rows.add({**key, **measured(kind, method, n, given.device)})


if __name__ == "__main__":
    main()
