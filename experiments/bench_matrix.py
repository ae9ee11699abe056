"""A given cost matrix, solved to a marginal error by us and by peers, on the same machine.

    python -m experiments.bench_matrix [--device cpu] [--sizes N ...] [--epsilons E ...]

The problem of FastSinkhorn: a grid of n points on [0, 1], Gaussian masses at 0.3 and 0.7 of spread
0.08, |x - y|^2 as a float32 matrix. Row sums are to be right to 1e-6 in L1, or to what float32
allows if that is more: the same for all, evaluated in float64 from the potentials of each. Methods
that alternate do as many updates as that takes in float64 and look at nothing else on the way,
unless it is their habit; our time includes range, mean and certificate. A method whose updates
would take longer than the cap is not run, and its time is that of one update times their number. A
wrong result is not timed. POT is told not to stop; geomloss, which has no tolerance, goes down its
schedule and its error is what it is.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import graphed
from otdd_flash.solver.matrix_comparison import MatrixComparison

SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16_384)}
EPSILONS = (0.1, 0.01, 0.001)
TOLERANCE, SPREAD, CENTRES = 1e-6, 0.08, (0.3, 0.7)
CALLS, MOST_UPDATES, LOOK = 3, 200_000, 10


class Potentials(NamedTuple):
    """Of the plan a_i b_j exp((f_i + g_j - C_ij) / epsilon), float64."""

    f: Tensor
    g: Tensor


class Work:
    """Costs and masses, and what is asked of a solution."""

    def __init__(self, n: int, epsilon: float, device: str) -> None:
        x = torch.linspace(0, 1, n, dtype=torch.float64, device=device)
        bumps = [torch.exp(-((x - at) ** 2) / (2 * SPREAD**2)) for at in CENTRES]
        self.a, self.b = (bump / bump.sum() for bump in bumps)
        self.x, self.costs = x.float()[:, None], (x[:, None] - x).square().float()
        self.epsilon, self.device = epsilon, device
        self.tolerance, self.updates = self._asked()

    def row_error(self, found: Potentials) -> float:
        """The larger of |P 1 - a| and |P^T 1 - b| in L1, in float64, in blocks of rows."""
        (f, g), total, columns = found, 0.0, torch.zeros_like(self.b)
        height = max(1, (1 << 24) // len(f))
        for first in range(0, len(f), height):
            rows = slice(first, first + height)
            exponents = (f[rows, None] + g - self.costs[rows].double()) / self.epsilon
            plan = self.a[rows, None] * exponents.exp_() * self.b
            total += float((plan.sum(1) - self.a[rows]).abs().sum())
            columns += plan.sum(0)
        return max(total, float((columns - self.b).abs().sum()))

    def _asked(self) -> tuple[float, int]:
        """The error that float32 allows, and the alternating updates that it takes in float64."""
        options = otdd.Converged(TOLERANCE)
        tolerance = TOLERANCE
        while True:
            try:
                otdd.matrix_transport(
                    self.costs, self.a, self.b, epsilon=self.epsilon, options=options
                )
                break
            except otdd.InputError:
                tolerance *= 2
                options = otdd.Converged(tolerance)
        scale = 1 / self.epsilon
        kernel = torch.exp(-self.costs.double() * scale)
        if float(kernel.amin()) == 0 or len(self.x) > 4096:
            return tolerance, self._updates_in_logs(tolerance)
        v = torch.ones_like(self.b)
        for update in range(1, MOST_UPDATES + 1):
            u = 1 / (kernel @ (self.b * v))
            columns = kernel.T @ (self.a * u)
            if float((self.b * (v * columns - 1)).abs().sum()) <= tolerance:
                return tolerance, update
            v = 1 / columns
        return tolerance, MOST_UPDATES

    def _updates_in_logs(self, tolerance: float) -> int:
        """On a grid of 512 points, from which the number hardly differs at more."""
        if len(self.x) > 512:
            return Work(512, self.epsilon, self.device).updates
        costs, g = self.costs.double(), torch.zeros_like(self.b)
        for update in range(1, MOST_UPDATES + 1):
            f = softmin(costs, self.b, g, self.epsilon)
            updated = softmin(costs.T, self.a, f, self.epsilon)
            off = (self.b * torch.expm1((g - updated) / self.epsilon)).abs().sum()
            if float(off) <= tolerance:
                return update
            g = updated
        return MOST_UPDATES


def softmin(costs: Tensor, masses: Tensor, potential: Tensor, epsilon: float) -> Tensor:
    """-epsilon log sum_j q_j exp((g_j - C_ij) / epsilon), as one writes it in PyTorch."""
    logs = masses.log().to(costs) + potential / epsilon
    return -epsilon * torch.logsumexp(logs - costs / epsilon, 1)


# method(work, updates): potentials after that many updates of both, or as many as it takes.
Method = Callable[[Work, int], Potentials]


def ours(work: Work, updates: int) -> Potentials:
    """To the tolerance, with the certificate, whatever `updates` is."""
    options = otdd.Converged(work.tolerance, require_convergence=True)
    found = otdd.matrix_transport(work.costs, work.a, work.b, epsilon=work.epsilon, options=options)
    return Potentials(found.f.double(), found.g.double())


def plain(work: Work, updates: int) -> Potentials:
    """Both updates in PyTorch."""
    g = torch.zeros_like(work.b, dtype=torch.float32)
    for _ in range(updates):
        f = softmin(work.costs, work.b, g, work.epsilon)
        g = softmin(work.costs.T, work.a, f, work.epsilon)
    return Potentials(f.double(), g.double())


def pot(work: Work, updates: int) -> Potentials:
    """`ot.bregman.sinkhorn_log`: PyTorch on a GPU, NumPy on a processor."""
    import ot

    given: list[Any] = [work.a.float(), work.b.float(), work.costs]
    if work.device == "cpu":
        given = [one.numpy() for one in given]
    _, log = ot.bregman.sinkhorn_log(
        *given, work.epsilon, numItermax=updates, stopThr=0, warn=False, log=True
    )
    f, g = (torch.as_tensor(np.asarray(one) if work.device == "cpu" else one) for one in
            (log["log_u"], log["log_v"]))  # fmt: skip
    masses = (work.a, f), (work.b, g)
    found = (work.epsilon * (log_u.double() - side.log()) for side, log_u in masses)
    return Potentials(*found)


def ott_jax(work: Work, updates: int) -> Potentials:
    """`Geometry(cost_matrix)` and `Sinkhorn` in log mode, compiled, with a look in ten updates."""
    import jax

    given = (jax.numpy.asarray(one.float().cpu().numpy()) for one in (work.a, work.b, work.costs))
    found = _ott_solver(-(-updates // LOOK) * LOOK, work.epsilon)(*given)
    f, g = (torch.from_numpy(np.array(one)).double().to(work.device) for one in found)
    return Potentials(f - work.epsilon * work.a.log(), g - work.epsilon * work.b.log())


_SOLVERS: dict[tuple[int, float], Any] = {}


def _ott_solver(updates: int, epsilon: float) -> Any:
    """A compiled function of masses and costs, made once."""
    import jax
    from ott.geometry import geometry
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    if (updates, epsilon) not in _SOLVERS:
        solver = sinkhorn.Sinkhorn(
            threshold=-1.0, max_iterations=updates, min_iterations=updates, inner_iterations=LOOK
        )

        def solve(a: Any, b: Any, costs: Any) -> Any:
            geom = geometry.Geometry(cost_matrix=costs, epsilon=epsilon)
            return solver(linear_problem.LinearProblem(geom, a=a, b=b)).potentials

        _SOLVERS[updates, epsilon] = jax.jit(solve)
    return _SOLVERS[updates, epsilon]


def geomloss(work: Work, updates: int) -> Potentials:
    """`SamplesLoss` with its own schedule, tensorized; blur^2 is epsilon for its cost |x - y|^2."""
    from geomloss import SamplesLoss

    loss = SamplesLoss(
        "sinkhorn", p=2, blur=work.epsilon**0.5, scaling=0.9, debias=False, potentials=True,
        cost=lambda x, y: (x[:, :, None] - y[:, None]).square().sum(-1), backend="tensorized",
    )  # fmt: skip
    f, g = loss(work.a.float(), work.x, work.b.float(), work.x)
    return Potentials(f.flatten().double(), g.flatten().double())


METHODS: dict[str, Method] = {
    "ours": ours,
    "PyTorch": plain,
    "POT sinkhorn_log": pot,
    "OTT-JAX": ott_jax,
    "geomloss": geomloss,
}
# Those whose time does not grow with the number of updates that is asked for.
FREE = ("ours", "geomloss")


def seconds_of(run: Callable[[], object], device: str, calls: int = CALLS) -> float:
    """Median wall time after one call."""
    times = []
    for call in range(calls + 1):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if call or calls == 0:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def bench(name: str, work: Work, cap: float) -> dict[str, Any]:
    """The entries of one row."""
    method, row = METHODS[name], {"tolerance": work.tolerance, "updates": work.updates}
    if name not in FREE:
        few = seconds_of(lambda: method(work, LOOK), work.device, 1)
        many = seconds_of(lambda: method(work, 2 * LOOK), work.device, 1)
        each = max(many - few, 0.1 * few) / LOOK
        row["ms_per_update"] = 1e3 * each
        if each * work.updates > cap:
            return row | {"seconds": each * work.updates, "extrapolated": True}
    found = method(work, work.updates)
    row["row_error"] = work.row_error(found)
    if not row["row_error"] <= 2 * work.tolerance and name != "geomloss":
        return row | {"wrong": True}
    row["seconds"] = seconds_of(lambda: method(work, work.updates), work.device)
    return row


def ours_alone(work: Work) -> dict[str, Any]:
    """Our iterations, the certified interval, and the time of one."""
    options = otdd.Converged(work.tolerance)
    found = otdd.matrix_transport(work.costs, work.a, work.b, epsilon=work.epsilon, options=options)
    problem = MatrixComparison.prepare(work.costs, work.a, work.b, None)
    operator, g = problem.operator("xy"), found.g
    return {
        "backend": operator.passes.backend,
        "iterations": found.iterations,
        "passes": found.passes,
        "value": found.value,
        "bounds": list(found.bounds),
        "transport_cost": found.transport_cost,
        "ms_per_update": milliseconds_of_an_update(operator, g, work),
    }


def milliseconds_of_an_update(operator: Any, g: Tensor, work: Work) -> float:
    """Of both potentials; on a GPU from a CUDA graph, and by one read where the operator sweeps."""
    on_gpu = work.device == "cuda"
    level = torch.tensor([work.epsilon], dtype=torch.float64, device=work.device)
    active = torch.ones_like(level, dtype=torch.bool)
    epsilon = level[0] if on_gpu else work.epsilon

    def step() -> Any:
        if getattr(operator, "sweeps", False):
            return operator.sweep(g, level, active)
        return operator.softmin_columns(operator.softmin_rows(g, epsilon), epsilon)

    return graphed(step) if on_gpu else 1e3 * seconds_of(step, work.device, 10)


def main() -> None:
    """Write bench_matrix_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--cap", type=float, default=20.0, help="seconds of a run at the most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    packages = "torch", "triton", "POT", "geomloss", "jax", "ott-jax"
    rows = Rows(
        f"bench_matrix_{given.device}",
        ("method", "n", "epsilon"),
        *packages,
        folder=given.output,
        again=given.again,
    )
    for epsilon in given.epsilons:
        for n in sorted(given.sizes or SIZES[given.device], reverse=True):
            left = [
                name for name in given.methods if not rows.has(method=name, n=n, epsilon=epsilon)
            ]
            if not left:
                continue
            work = Work(n, epsilon, given.device)
            for name in left:
                row: dict[str, Any] = {"method": name, "n": n, "epsilon": epsilon}
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        row |= bench(name, work, given.cap)
                        row |= ours_alone(work) if name == "ours" else {}
                except ImportError as error:
                    row["missing"] = str(error)
                except torch.OutOfMemoryError:
                    row["out_of_memory"] = True
                rows.add(row)


if __name__ == "__main__":
    main()
