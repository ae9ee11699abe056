"""Certified divergences of many small pairs at once on a GPU, beside one by one and geomloss.

    python -m experiments.bench_losses [--output DIR] [--again]

B pairs of Gaussian clouds of 200 + 200 points in 64 dimensions, a mini-batch of sets, or of sizes
between half of that and all. Every call gets clouds that it has not seen, and is timed by the
host's clock until all numbers are there: medians of ten calls after three. Forward, and with the
gradient by x.

- ours: `sinkhorn_losses` with its defaults, to a marginal error of 1e-3, certified;
- one_by_one: `sinkhorn_loss` of every pair;
- geomloss at scaling 0.9, tensorized, all pairs in one tensor (clouds of one size alone).

A time counts if the numbers are those of `sinkhorn_loss` one by one, and the gradient of a pair is.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash import sinkhorn_loss, sinkhorn_losses

DIM, POINTS, SHIFT = 64, 200, 0.5
# Squared distances are 2 + SHIFT^2 on the average, and counted half.
RELATIVE_EPSILONS, MEAN_COST = (0.1, 0.01), 1 + SHIFT**2 / 2
BATCHES = ((256, True), (256, False), (32, True))
CALLS, WARM_UPS = 10, 3
AGREEMENT, GRADIENT_AGREEMENT = 1e-6, 1e-4


class Pairs(NamedTuple):
    """Clouds of both sides, in one tensor (B, n, d) each if they are of one size, and epsilon."""

    x: Tensor | list[Tensor]
    y: Tensor | list[Tensor]
    epsilon: float

    @classmethod
    def draw(cls, count: int, *, equal: bool, relative: float, seed: int) -> Pairs:
        """Around the origin and a point at `SHIFT` from it."""
        draw = torch.Generator("cuda").manual_seed(seed)
        options: dict[str, Any] = {"generator": draw, "device": "cuda"}
        x, y = (torch.randn(count, POINTS, DIM, **options) / math.sqrt(DIM) for _ in range(2))
        y[..., 0] += SHIFT
        epsilon = relative * MEAN_COST
        if equal:
            return cls(x, y, epsilon)
        sizes = torch.randint(POINTS // 2, POINTS + 1, (2, count), **options).tolist()
        ragged = [
            [cloud[:size].clone() for cloud, size in zip(side, of_side, strict=True)]
            for side, of_side in zip((x, y), sizes, strict=True)
        ]
        return cls(ragged[0], ragged[1], epsilon)


Call = Callable[[Pairs], Tensor]


def ours(pairs: Pairs) -> Tensor:
    """By this package, at once."""
    return sinkhorn_losses(pairs.x, pairs.y, epsilon=pairs.epsilon)


def one_by_one(pairs: Pairs) -> Tensor:
    """By this package, one after the other."""
    clouds = zip(pairs.x, pairs.y, strict=True)
    return torch.stack([sinkhorn_loss(x, y, epsilon=pairs.epsilon) for x, y in clouds])


def geomloss(pairs: Pairs) -> Tensor:
    """By geomloss, whose cost is half of the squared distance, as ours."""
    from geomloss import SamplesLoss

    blur = math.sqrt(pairs.epsilon)
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=0.9, backend="tensorized")
    values: Tensor = loss(pairs.x, pairs.y)
    return values


def attached(pairs: Pairs) -> Pairs:
    """The same pairs, with a gradient by x."""
    if isinstance(pairs.x, Tensor):
        return pairs._replace(x=pairs.x.clone().requires_grad_())
    return pairs._replace(x=[cloud.clone().requires_grad_() for cloud in pairs.x])


def timed(call: Call, drawn: Sequence[Pairs], *, gradient: bool) -> tuple[float, Tensor]:
    """Median milliseconds of a call, and the numbers of the last one."""
    times, values = [], torch.zeros(0)
    for pairs in drawn:
        pairs = attached(pairs) if gradient else pairs
        torch.cuda.synchronize()
        started = time.perf_counter()
        found = call(pairs)
        if gradient:
            found.sum().backward()  # type: ignore[no-untyped-call]
        values = found.detach().cpu()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[WARM_UPS:]), values


def check_gradient(pairs: Pairs) -> float:
    """How far the gradient of the last pair is from that of its own loss, over its length.

    Raises:
        AssertionError: too far.
    """
    together = attached(pairs)
    ours(together).sum().backward()  # type: ignore[no-untyped-call]
    alone = pairs.x[-1].clone().requires_grad_()
    sinkhorn_loss(alone, pairs.y[-1], epsilon=pairs.epsilon).backward()  # type: ignore[no-untyped-call]
    found = together.x.grad if isinstance(together.x, Tensor) else together.x[-1].grad
    assert found is not None
    assert alone.grad is not None
    found = found[-1] if isinstance(together.x, Tensor) else found
    error = float((found - alone.grad).norm() / alone.grad.norm())
    assert error <= GRADIENT_AGREEMENT
    return error


def bench(count: int, relative: float, *, equal: bool) -> dict[str, Any]:
    """One row."""
    drawn = [
        Pairs.draw(count, equal=equal, relative=relative, seed=seed)
        for seed in range(CALLS + WARM_UPS)
    ]
    calls: dict[str, Call] = {"ours": ours, "one_by_one": one_by_one}
    if equal:
        calls["geomloss"] = geomloss
    row: dict[str, Any] = {"pairs": count, "points": POINTS, "d": DIM}
    row |= {"epsilon": relative, "equal_sizes": equal}
    values: dict[str, Tensor] = {}
    for name, call in calls.items():
        for gradient in (False, True):
            found, values[name] = timed(call, drawn, gradient=gradient)
            row[f"{name}{'_with_gradient' if gradient else ''}_ms"] = found
    off = {name: float((found / values["ours"] - 1).abs().max()) for name, found in values.items()}
    assert off["one_by_one"] <= AGREEMENT
    return row | {"off": off, "gradient_off": check_gradient(drawn[-1])}


def main() -> None:
    """Write bench_losses.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_losses needs a CUDA device")
    warnings.simplefilter("ignore")
    keys = ("pairs", "epsilon", "equal_sizes")
    packages = ("torch", "triton", "geomloss")
    rows = Rows("bench_losses", keys, *packages, folder=given.output, again=given.again)
    for count, equal in BATCHES:
        for relative in RELATIVE_EPSILONS:
            if not rows.has(pairs=count, epsilon=relative, equal_sizes=equal):
                rows.add(bench(count, relative, equal=equal))


if __name__ == "__main__":
    main()
