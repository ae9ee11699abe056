"""Maps and potentials with their gradients by the points, beside OTT-JAX and flash-sinkhorn.

    python -m experiments.bench_map_gradient [--device cpu] [--sizes N ...] [--epsilons E ...]

n = m Gaussian points in 64 dimensions, uniform masses, the cost ||x - y||^2 / 2, epsilon relative
to its mean. Medians of three calls after one, by the host's clock until all is there, of fewer
where calls take long:

- map: `transport_map`, to 1e-3, and its gradient by x, to 1e-5;
- potentials: `sinkhorn_potentials`, likewise;
- ott_jax: potentials and gradient by x, from `PointCloud` with `ImplicitDiff`, together;
- ott_jax_batched: the same, of 1,024 rows of costs at a time;
- flash_sinkhorn: the same by `implicit_grad_x`, after 200 iterations.

Errors are relative, against float64 at 1e-10, up to n = 1,000. Memory is the peak over what was
there before, of the backward pass.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

SIZES, EPSILONS, DIM, SHIFT = (1_000, 5_000, 10_000, 50_000), (0.1, 0.01, 0.001), 64, 0.5
CALLS, WARM_UPS, LARGEST_IN_DOUBLE, WORST = 3, 1, 1_000, 0.01
# Seconds of calls after which no other one begins.
LONG = 10.0
METHODS = "map", "potentials", "ott_jax", "ott_jax_batched", "flash_sinkhorn"
# Of flash-sinkhorn, which takes no tolerance.
ITERATIONS = 200


class Work:
    """Clouds, a cotangent of each result, and the truth."""

    def __init__(self, n: int, d: int, relative: float, device: str) -> None:
        draw = torch.Generator().manual_seed(0)
        x, y, of_map = (torch.randn(n, d, generator=draw).to(device) for _ in range(3))
        self.x, self.y = x, y + SHIFT
        self.epsilon, self.device = relative * (d + d * SHIFT**2 / 2), device
        self.cotangents = {"map": of_map, "potentials": torch.randn(n, generator=draw).to(device)}
        self._ott: dict[int | None, tuple[Callable[[Any], Any], Any]] = {}

    def forward(self, name: str, x: Tensor, **settings: Any) -> Tensor:
        """The map, or f."""
        y = self.y.to(x)
        if name == "map":
            return otdd.transport_map(x, y, epsilon=self.epsilon, **settings)
        return otdd.sinkhorn_potentials(x, y, epsilon=self.epsilon, **settings)[0]

    def backward(self, name: str, x: Tensor, result: Tensor) -> Tensor:
        """By x."""
        cotangent = self.cotangents[name].to(result)
        return torch.autograd.grad(result, x, cotangent, retain_graph=True)[0]

    def truth(self, name: str) -> Tensor:
        """The gradient, to many digits."""
        x = self.x.double().requires_grad_()
        settings = {"options": otdd.Converged(1e-10), "cg": otdd.CGOptions(1e-10)}
        return self.backward(name, x, self.forward(name, x, **settings))

    def ott_jax(self, batch_size: int | None = None) -> Tensor:
        """The gradient of <cotangent, f> by x."""
        if batch_size not in self._ott:
            self._ott[batch_size] = self._gradient_of_ott(batch_size)
        gradient, x = self._ott[batch_size]
        return from_dlpack(gradient(x).block_until_ready())

    def ott_jax_batched(self) -> Tensor:
        """The same in little memory."""
        return self.ott_jax(batch_size=1024)

    def _gradient_of_ott(self, batch_size: int | None) -> tuple[Callable[[Any], Any], Any]:
        """Compiled when it is called first, and what it takes."""
        import jax
        from jax._src.interpreters import batching
        from ott.geometry import costs, pointcloud
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import implicit_differentiation, sinkhorn

        # OTT-JAX 0.6 asks for it where JAX had it before 0.11.
        jax.interpreters.batching.is_vmappable = batching.is_vmappable
        implicit = implicit_differentiation.ImplicitDiff()
        solver = sinkhorn.Sinkhorn(threshold=1e-3, implicit_diff=implicit)
        given = (self.x, self.y, self.cotangents["potentials"])
        x, y, cotangent = (jax.numpy.asarray(part.cpu().numpy()) for part in given)

        def loss(x: Any) -> Any:
            cost = pointcloud.PointCloud(
                x, y, cost_fn=costs.SqEuclidean(), epsilon=2 * self.epsilon, batch_size=batch_size
            )
            f, g = (part for part in solver(linear_problem.LinearProblem(cost)).potentials)
            return ((f + g.mean()) * cotangent).sum() / 2

        return jax.jit(jax.grad(loss)), x

    def flash_sinkhorn(self) -> Tensor:
        """The same gradient, by its own solve of so many iterations."""
        from flash_sinkhorn import implicit_grad_x

        masses = torch.full_like(self.x[:, 0], 1 / len(self.x))
        by_f = self.cotangents["potentials"]
        # Of f + <b, g>, at twice the cost.
        found, _ = implicit_grad_x(
            self.x, self.y, masses, masses, by_f, masses * by_f.sum(),
            eps=2 * self.epsilon, cost_scale=1.0, n_iters=ITERATIONS,
        )  # fmt: skip
        gradient: Tensor = found / 2
        return gradient


def timed(call: Callable[[], Tensor], device: str) -> tuple[float, float | None, Tensor]:
    """Median milliseconds, the peak of memory in MiB, and what came of the last call."""
    cuda, times = device == "cuda", []
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UPS + CALLS):
        started = time.perf_counter()
        found = call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        if len(times) > WARM_UPS and sum(times) > 1e3 * LONG:
            break
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
    return statistics.median(times[WARM_UPS:]), peak, found


def bench(work: Work, method: str) -> dict[str, Any]:
    """The entries of one row."""
    if method in ("map", "potentials"):
        return ours(work, method)
    x = work.x.clone().requires_grad_()
    reference = work.backward("potentials", x, work.forward("potentials", x))
    try:
        milliseconds, _, found = timed(getattr(work, method), work.device)
    # A peer may fail in any way, and the other rows are still wanted.
    except Exception as error:
        return {"failed": told(error)}
    off = float((found.to(reference) - reference).norm() / reference.norm())
    return {"difference": off, **({"ms": milliseconds} if off <= WORST else {})}


def told(error: Exception) -> str:
    """What went wrong: of a traceback inside of a message the error that it ends with."""
    lines = [f"{type(error).__name__}: {error}", *str(error).splitlines()]
    inner = [line.strip() for line in lines if re.match(r"\s*\w+Error: ", line)]
    return inner[-1][:200]


def ours(work: Work, name: str) -> dict[str, Any]:
    """Of the map, or of the potentials."""
    x = work.x.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward, _, result = timed(partial(work.forward, name, x), work.device)
        backward, peak, found = timed(partial(work.backward, name, x, result), work.device)
    row: dict[str, Any] = {"forward_ms": forward, "backward_ms": backward, "peak_mib": peak}
    row["warnings"] = sorted({str(one.message) for one in caught})
    if len(work.x) <= LARGEST_IN_DOUBLE:
        truth = work.truth(name)
        row["relative_error"] = float((found.double() - truth).norm() / truth.norm())
    return row


def main() -> None:
    """Write bench_map_gradient_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dimension", type=int, default=DIM)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    given = parser.parse_args()
    rows = Rows(
        f"bench_map_gradient_{given.device}",
        ("method", "n", "d", "relative_epsilon"),
        *("torch", "triton", "ott-jax", "jax", "flash-sinkhorn"),
        folder=given.output,
        again=given.again,
    )
    for n, relative in product(given.sizes, given.epsilons):
        known = {"n": n, "d": given.dimension, "relative_epsilon": relative}
        left = [name for name in given.methods if not rows.has(method=name, **known)]
        if left:
            work = Work(n, given.dimension, relative, given.device)
        for name in left:
            rows.add({"method": name, **known, "device": given.device, **bench(work, name)})


if __name__ == "__main__":
    main()
