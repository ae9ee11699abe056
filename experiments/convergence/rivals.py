"""The peers on the cross term without labels, in our convention of potentials.

    C_ij = ||x_i - y_j||^2 / 2,      P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon)

- flash-sinkhorn: half cost, its default TF32 points. Its symmetric solver goes down its default
  schedule (scaling 0.5) and on at the final epsilon, from look to look by its `f_init`, whose first
  step is a full and not an averaged one. It stops by a threshold on the change of potentials: one
  that guarantees the target is met later than the look that counts here. Its alternating solver
  has no schedule and starts from zero; it is made to end with rows exact, as plain updates do.
- geomloss: tensorized, p = 2, blur = sqrt(epsilon), its own diameter, final extrapolation included.
- OTT-JAX: `Sinkhorn` in log mode on a cost matrix, ten iterations between its looks as by default,
  float32, compiled before; plan exp((f + g - C) / epsilon), so epsilon log of the masses goes off.
- POT: `sinkhorn_knopp` in float64 with its scaling vectors, and `sinkhorn_log` in float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.bench_divergence import marginal_error
from experiments.convergence.methods import Budgets, Run, Settings, Solved
from experiments.convergence.problem import COST, CrossTerm
from otdd_flash.operators.base import Operator

SCALINGS = (0.5, 0.9, 0.99)
OTT_ITERATIONS = 10
# Where flash-sinkhorn's symmetric solver stops to fuse both updates.
FUSED_BELOW = 30_000


class FlashSymmetric:
    """flash-sinkhorn's symmetric solver: its schedule, then averaged updates."""

    def __init__(self, term: CrossTerm) -> None:
        tune_quickly()
        self.term = term
        self.masses = [side.masses.float() for side in (term.source, term.target)]
        self.points: list[Tensor] = []
        self.own: Operator | None = None

    def begin(self) -> None:
        """Centre and round the points, and go down the schedule."""
        from flash_sinkhorn.kernels._common import epsilon_schedule, max_diameter

        self.points = flash_points(self.term)
        epsilon = self.term.epsilon
        schedule = epsilon_schedule(max_diameter(*self.points), epsilon**0.5, 0.5)
        self.f, self.g = self._solve(schedule, None, None)
        self.passes = 2 * (len(schedule) + 1)

    def advance(self, steps: int) -> Solved:
        """Go on at the final epsilon, at least two steps."""
        steps = max(2, steps)
        schedule = [self.term.epsilon] * (steps - 1)
        self.f, self.g = self._solve(schedule, self.f, self.g)
        self.passes += 2 * steps
        return Solved(self.f, self.g, self.passes)

    def own_error(self, f: Tensor, g: Tensor) -> float | None:
        """On its TF32 points."""
        if self.own is None:
            self.own = self.term.operator("high", (self.points[0], self.points[1]))
        return marginal_error(self.own, f, g, self.term.epsilon)

    def _solve(
        self, schedule: Sequence[float], f: Tensor | None, g: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_symmetric

        solved: tuple[Tensor, Tensor] = sinkhorn_flashstyle_symmetric(
            *self.points,
            *self.masses,
            eps_list=schedule,
            cost_scale=COST.lambda_x,
            f_init=f,
            g_init=g,
            last_extrapolation=False,
        )
        return solved


def flash_alternating(term: CrossTerm, iterations: Sequence[int]) -> Budgets:
    """flash-sinkhorn's alternating solver at the final epsilon.

    In its `ott_convention` it runs the kernel of its symmetric solver at 30,000 points and more, of
    the same speed there and tuned already; below, the other one takes fewer launches.
    """
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    tune_quickly()
    a, b = (side.masses.float() for side in (term.source, term.target))
    settings = {"eps": term.epsilon, "cost_scale": COST.lambda_x}
    own: list[Operator] = []

    def solve(count: int) -> Solved:
        x, y = flash_points(term)
        if len(x) >= FUSED_BELOW:
            f, g = sinkhorn_flashstyle_alternating(
                x, y, a, b, n_iters=count, ott_convention=True, **settings
            )
            f, g = f - term.epsilon * a.log(), g - term.epsilon * b.log()
        else:
            g, f = sinkhorn_flashstyle_alternating(y, x, b, a, n_iters=count, **settings)
        return Solved(f, g, 2 * count)

    def own_error(f: Tensor, g: Tensor) -> float:
        if not own:
            x, y = flash_points(term)
            own.append(term.operator("high", (x, y)))
        return marginal_error(own[0], f, g, term.epsilon)

    return Budgets(solve, iterations, own_error)


def flash_points(term: CrossTerm) -> list[Tensor]:
    """Both clouds, centred and rounded as flash-sinkhorn's `SamplesLoss` does."""
    from flash_sinkhorn.samples_loss import _center_coords, _round_to_tf32

    clouds = term.source.features, term.target.features
    masses = (side.masses.float() for side in (term.source, term.target))
    return [_round_to_tf32(side) for side in _center_coords(*clouds, *masses, batched=False)]


def tune_quickly() -> None:
    """Let flash-sinkhorn's tuner time each candidate twice instead of for an eighth of a second.

    At 60,000 points a candidate takes up to 0.2 s, there are about fifty, and every size is tuned
    anew. All candidates still compete.
    """
    from flash_sinkhorn.kernels import sinkhorn_flashstyle_sqeuclid as kernels
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.do_bench = _time_twice


def _time_twice(run: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds of the second of two runs, for each quantile."""
    run()
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return [start.elapsed_time(end)] * len(quantiles)


def geomloss(term: CrossTerm) -> Settings:
    """A point for each scaling."""
    from geomloss import SamplesLoss
    from geomloss._legacy.sinkhorn_divergence import epsilon_schedule, max_diameter

    x, y = term.source.features, term.target.features
    a, b = (side.masses.float() for side in (term.source, term.target))
    blur = math.sqrt(term.epsilon)
    diameter = max_diameter(x, y)

    def solve(scaling: float, passes: int) -> Solved:
        loss = SamplesLoss(
            "sinkhorn",
            p=2,
            blur=blur,
            scaling=scaling,
            debias=False,
            potentials=True,
            backend="tensorized",
        )
        with torch.no_grad():
            f, g = loss(a, x, b, y)
        return Solved(f.detach().flatten(), g.detach().flatten(), passes)

    runs = []
    for scaling in SCALINGS:
        # A first and a last full update beside the schedule.
        passes = 2 * (len(epsilon_schedule(2, diameter, blur, scaling)) + 2)
        runs.append(
            Run(
                {"scaling": scaling},
                lambda scaling=scaling, passes=passes: solve(scaling, passes),  # type: ignore[misc]
                passes,
            )
        )
    return Settings(runs)


class Ott:
    """OTT-JAX's `Sinkhorn`, ten iterations a step."""

    def __init__(self, term: CrossTerm) -> None:
        import jax
        from jax import numpy as jnp
        from ott.geometry.geometry import Geometry
        from ott.problems.linear.linear_problem import LinearProblem
        from ott.solvers.linear.sinkhorn import Sinkhorn

        self.term = term
        sides = term.source, term.target
        self.points = [jnp.asarray(side.features.float().numpy()) for side in sides]
        self.masses = [jnp.asarray(side.masses.float().numpy()) for side in sides]
        solver = Sinkhorn(
            threshold=0.0, inner_iterations=OTT_ITERATIONS, max_iterations=OTT_ITERATIONS
        )

        def costs(x: Any, y: Any) -> Any:
            squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :]
            return COST.lambda_x * jnp.maximum(squares - 2 * x @ y.T, 0)

        def solve(matrix: Any, f: Any, g: Any) -> tuple[Any, Any]:
            problem = LinearProblem(Geometry(matrix, epsilon=term.epsilon), *self.masses)
            out = solver(problem, init=(f, g))
            return out.f, out.g

        self.costs, self.solve = jax.jit(costs), jax.jit(solve)
        self.start = [term.epsilon * jnp.log(masses) for masses in self.masses]

    def begin(self) -> None:
        """The cost matrix, and the potentials that are 0 in our convention."""
        self.matrix = self.costs(*self.points).block_until_ready()
        self.f, self.g = self.start
        self.passes = 0

    def advance(self, steps: int) -> Solved:
        """Ten iterations for every ten steps that are asked for, at least."""
        for _ in range(math.ceil(steps / OTT_ITERATIONS)):
            self.f, self.g = self.solve(self.matrix, self.f, self.g)
            self.passes += 2 * OTT_ITERATIONS
        f, g = (
            torch.from_numpy(np.array(potential - start))
            for potential, start in zip((self.f, self.g), self.start, strict=True)
        )
        return Solved(f, g, self.passes)

    def own_error(self, f: Tensor, g: Tensor) -> float | None:
        """It rounds nothing."""
        return None


def pot(term: CrossTerm, iterations: Sequence[int], *, log_domain: bool) -> Budgets:
    """POT's `sinkhorn_log` or `sinkhorn_knopp` on a cost matrix, without stopping.

    Raises:
        RuntimeError: by a run whose scaling vectors leave float64's range.
    """
    from ot.bregman import sinkhorn_knopp, sinkhorn_log

    dtype = torch.float32 if log_domain else torch.float64

    def solve(count: int) -> Solved:
        x, y = (side.features.to(dtype) for side in (term.source, term.target))
        a, b = (side.masses.to(dtype) for side in (term.source, term.target))
        cost = torch.cdist(x, y).square_().mul_(COST.lambda_x)
        method = sinkhorn_log if log_domain else sinkhorn_knopp
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*numerical errors", category=UserWarning)
            try:
                _, log = method(
                    a, b, cost, term.epsilon, numItermax=count, stopThr=0, log=True, warn=False
                )
            except UserWarning as warning:
                raise RuntimeError(str(warning)) from None
        u, v = (log["log_u"], log["log_v"]) if log_domain else (log["u"].log(), log["v"].log())
        return Solved(term.epsilon * (u - a.log()), term.epsilon * (v - b.log()), 2 * count)

    return Budgets(solve, iterations)
