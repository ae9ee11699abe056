"""The problem that a flow descends, and its divergence S_epsilon solved at every step.

`FlowSetting` holds the problem: both datasets, cost, metric between classes, epsilon and solver.
`TargetDivergence` solves S_epsilon between moving particles and a fixed target, with its gradient.
The target's self term is solved once, or continued at the next step if it stopped early. The other
two terms start from the extrapolation 2 u_k - u_(k-1) of the potentials u of the last two steps: on
a smooth path they change by nearly the same amount at each step, and the error of this start is of
second order in the step.

`flows.run` makes the setting; `flows.loop` and `flows.evaluation` use it, and the modules of
`flows.modes` solve through `TargetDivergence`; `flows.stepping` takes the rows of a `Batch`.
`FlowSetting.settings` is stored in checkpoints and compared when a flow is resumed, so its keys are
part of their format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.files.tensor_file import content_hash
from otdd_flash.labels import ClassDistances, Given, LabelMetric, PairFunction
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.operators.build import class_indices
from otdd_flash.operators.cloud import mass_per_class
from otdd_flash.operators.float64_rows import squared_distances, squared_norms, weighted_mean
from otdd_flash.operators.request import Request
from otdd_flash.samples import LabeledSamples, displaced
from otdd_flash.solver.class_blocks import ClassBlocks
from otdd_flash.solver.divergence import Divergence, report_convergence
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.term.result import Progress, TransportTerm
from otdd_flash.solver.term_gradient import Gradient, Needs


@dataclass(frozen=True, eq=False)
class FlowSetting:
    """The problem that a flow descends.

    Attributes:
        request: features, labels and weights of the n particles at the start and of the m target
            points, as the ground cost sees them; on the device, except target points that stream.
        metric: the metric between classes.
        epsilon: regularisation, in units of the cost.
        solver: how to solve and when to stop.
        progress: called for each iteration of each solve.
        class_progress: called with the number of pairs of classes compared.
    """

    request: Request
    metric: LabelMetric
    epsilon: float
    solver: Schedule
    progress: Progress | None = None
    class_progress: PairProgress | None = None

    @property
    def source(self) -> LabeledSamples:
        """The particles at the start."""
        return self.request.seen[0]

    @property
    def target(self) -> LabeledSamples:
        """The dataset that the particles move towards."""
        return self.request.seen[1]

    def blocks(self, table: Tensor) -> ClassBlocks:
        """Cut W (V_x + V_y, V_x + V_y) into the blocks that several evaluations use."""
        sizes = self.source.class_total, self.target.class_total
        return ClassBlocks(table, sizes, self.request.device)

    @cached_property
    def masses(self) -> Tensor:
        """The masses of the particles (n,), float64."""
        return self.source.masses

    def at(self, features: Tensor) -> LabeledSamples:
        """Return the particles with new features (n, d), which must be finite."""
        start = self.source.features
        as_before = all(
            getattr(features, what) == getattr(start, what) for what in ("shape", "dtype", "device")
        )
        if not as_before:
            return replace(self.source, features=features, subset_hash=None)
        return displaced(self.source, features)

    def mean_cost(self, features: Tensor, class_distances: ClassDistances) -> float:
        """Return sum_ij a_i b_j C_ij of the particles with features (n, d), without any solve.

        With c the target's mean it is lambda_x (sum_i a_i ||x_i - c||^2 + sum_j b_j ||y_j - c||^2)
        plus the part of the classes. It is finite only if all features are.
        """
        (centre, spread), cost = self._target_moments, self.request.cost
        squares = self.masses @ squared_distances(features, centre)
        own, theirs = self._class_masses
        # Both summands are on the CPU.
        fixed = cost.squared.lambda_x * spread + cost.lambda_y * (own @ class_distances.xy @ theirs)
        return float(cost.squared.lambda_x * squares + fixed)

    def settings(
        self, points: LabeledSamples, goal: LabeledSamples, table: ClassDistances
    ) -> dict[str, Any]:
        """Return the settings by command-line keys, for both sides before the cost sees them.

        Args:
            points: the particles at the start.
            goal: the target.
            table: W at the start.
        """
        metric, compute = self.metric, self.request.compute
        labels = metric.to_dict()
        if isinstance(metric, Given | PairFunction):
            # These metrics are identified by their values alone.
            labels = {"given": content_hash({"W": table.full})}
        solver = asdict(self.solver)
        del solver["require_convergence"]
        return {
            "source": points.fingerprint,
            "target": goal.fingerprint,
            # Fingerprints depend on values only, but steps also on the type.
            "source.type": _type_of(points),
            "target.type": _type_of(goal),
            "labels.method": metric.name,
            **{f"labels.{key}": value for key, value in labels.items()},
            "epsilon": self.epsilon,
            **asdict(self.request.cost),
            "solver.schedule": self.solver.name,
            **{f"solver.{key}": value for key, value in solver.items()},
            "backend": compute.backend,
            "precision": compute.precision,
        }

    @cached_property
    def _target_moments(self) -> tuple[Tensor, Tensor]:
        """The target's mean (d,), and its mean squared distance from it on the CPU, float64."""
        points, masses = self.request.points(1), self.target.masses.to(self.request.device)
        centre = weighted_mean(points, masses)
        return centre, (masses @ squared_distances(points, centre)).cpu()

    @cached_property
    def _class_masses(self) -> tuple[Tensor, Tensor]:
        """The class masses of particles (V_x,) and target (V_y,), float64, on the CPU."""
        own, theirs = (_class_masses(side).cpu() for side in (self.source, self.target))
        return own, theirs

    @cached_property
    def target_square(self) -> float:
        """The target's mean squared norm."""
        masses = self.target.masses.to(self.request.device)
        return float(masses @ squared_norms(self.request.points(1)))


def _type_of(samples: LabeledSamples) -> str:
    return str(torch.promote_types(samples.features.dtype, torch.float32)).removeprefix("torch.")


class Batch(NamedTuple):
    """A minibatch of both sides: row indices (b,) of the particles and of the target."""

    particles: Tensor
    target: Tensor

    def only(self, rows: Tensor) -> Tensor:
        """Set to 0 the rows (n, d), one per particle, that are outside the batch."""
        return torch.zeros_like(rows).index_copy_(0, self.particles, rows[self.particles])


class TargetDivergence:
    """The divergence between moving particles and a fixed target, with warm starts.

    Args:
        setting: regularisation and tolerance.
        request: the particles at the start and the target, if not those of the setting.
    """

    def __init__(self, setting: FlowSetting, request: Request | None = None) -> None:
        self._setting = setting
        self._request = request or setting.request
        self._self_term: TransportTerm | None = None
        # Potentials of the last solve, and of the one before.
        self._potentials: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}

    def __call__(
        self,
        particles: LabeledSamples,
        table: Tensor | ClassBlocks,
        needs: Needs,
        batch: Batch | None = None,
    ) -> tuple[Divergence, Gradient]:
        """Solve, and differentiate by `needs`, where "x" is the features of the particles.

        Args:
            particles: n points.
            table: W (V_x + V_y, V_x + V_y), of which only the rows of the particles' classes may
                change from call to call; or its blocks.
            needs: inputs of the divergence, as in `DivergenceGradient`.
            batch: solve between these rows only, without a warm start; the gradient then is (b, d).

        Raises:
            ConvergenceError: the solver's options require convergence, and a term stopped early.
        """
        setting, (_, target) = self._setting, self._request.seen
        if batch is not None:
            particles, target = particles.take(batch.particles), target.take(batch.target)
        problem = Problem(self._request.at(particles, target), setting.epsilon, table)
        gradient = DivergenceGradient(problem, needs)
        with torch.no_grad():
            solved = problem.solve(
                setting.solver,
                start=None if batch is not None else self._start(),
                known=None if batch is not None else self._known(),
                progress=setting.progress,
                solved=gradient if needs else None,
            )
        if setting.solver.require_convergence:
            report_convergence(solved, setting.solver)
        if batch is not None:
            # After steps on batches, the potentials of the last full solve are far off.
            self._potentials = self._earlier = {}
        elif not solved.identical:
            assert solved.xx is not None
            self._self_term = solved.yy
            self._earlier = self._potentials
            self._potentials = {"xy": solved.xy.g, "xx": solved.xx.f}
        return solved, gradient.total

    def state(self) -> dict[str, Any]:
        """Return the potentials and self term that the next solve starts from."""
        return {"last": self._potentials, "earlier": self._earlier, "yy": self._self_term}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state`, which may be on another device."""
        device, term = self._setting.request.device, state["yy"]
        self._potentials, self._earlier = (
            {key: u.to(device) for key, u in state[when].items()} for when in ("last", "earlier")
        )
        if term is not None:
            # A self term has one potential.
            potential = term.g.to(device)
            term = replace(term, f=potential, g=potential)
        self._self_term = term

    def _start(self) -> dict[str, Tensor]:
        last, earlier = self._potentials, self._earlier
        start = {key: 2 * u - earlier[key] if earlier else u for key, u in last.items()}
        return start if self._self_term is None else start | {"yy": self._self_term.g}

    def _known(self) -> dict[str, TransportTerm]:
        term = self._self_term
        return {"yy": term} if term is not None and term.converged else {}


def _class_masses(samples: LabeledSamples) -> Tensor:
    """Return (V,) class masses, float64; unlabelled samples are one class."""
    return mass_per_class(samples.masses, class_indices(samples), samples.class_total)
