"""The objective of a flow: the problem, its divergence at every step, and the functionals.

`FlowSetting` holds the problem: both datasets, cost, metric between classes, epsilon and solver.
`TargetDivergence` solves S_epsilon between moving particles and a fixed target, with its gradient.
The target's self term is solved once, or continued at the next step if it stopped early. The other
two terms start from the extrapolation 2 u_k - u_(k-1) of the potentials u of the last two steps: on
a smooth path they change by nearly the same amount at each step, and the error of this start is of
second order in the step.

`Evaluator` adds the functionals and returns the velocities of all variables. A step may use a
minibatch of the points or points displaced by noise, and its value is then an estimate. Start and
end of a flow are evaluated on all points. Points that run away raise `Overshot`.

`flows.run` makes the setting and evaluates; `flows.modes` and `flows.joint_modes` solve through
`TargetDivergence`. `FlowSetting.settings` is stored in checkpoints and compared when a flow is
resumed, and in results, where `flows.result` reads it, so its keys are part of both formats. Random
draws depend only on the seed, the step and their purpose, so that a resumed flow repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.points import (
    class_indices,
    mass_per_class,
    squared_distances,
    squared_norms,
    weighted_mean,
)
from otdd_flash.derivatives.gradient import DivergenceGradient, Gradient, Needs
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError, UserCodeError
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.flows.functionals import WeightedFunctional, value_and_velocity
from otdd_flash.flows.result import StepRecord
from otdd_flash.flows.space import FeatureSpace
from otdd_flash.flows.stepping import (
    Batch,
    Draw,
    OwnedGradient,
    OwnedVelocity,
    generator,
    normal_like,
)
from otdd_flash.labels import ClassDistances, Given, LabelMetric, PairFunction
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import has_sets
from otdd_flash.samples import LabeledSamples, all_finite, displaced, largest_entry
from otdd_flash.solver.divergence import Divergence, Solved, report_convergence
from otdd_flash.solver.penalties import penalties_of
from otdd_flash.solver.schedules import Schedule
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import TransportTerm

if TYPE_CHECKING:
    from otdd_flash.flows.flow import Callbacks, Flow
    from otdd_flash.flows.modes import Mode


@dataclass(frozen=True, eq=False)
class FlowSetting:
    """The problem that a flow descends.

    Attributes:
        comparison: features, labels and weights of the n particles at the start and of the m target
            points, as the ground cost sees them, at epsilon; on the device, except target points
            that stream. Class distances are those of the mode.
        metric: the metric between classes.
        solver: how to solve and when to stop.
        flow: the options of the flow.
        functionals: those of the flow, built.
        callbacks: those of the user; modes call `class_progress`.
    """

    comparison: Comparison
    metric: LabelMetric
    solver: Schedule
    flow: Flow
    functionals: Sequence[WeightedFunctional]
    callbacks: Callbacks

    @property
    def source(self) -> LabeledSamples:
        """The particles at the start."""
        return self.comparison.transformed[0]

    @property
    def target(self) -> LabeledSamples:
        """The dataset that the particles move towards."""
        return self.comparison.transformed[1]

    @cached_property
    def masses(self) -> Tensor:
        """The masses of the particles (n,), float64."""
        return self.source.masses

    @cached_property
    def ranks(self) -> Ranks | None:
        """The processes that share the passes; None without a group."""
        group = self.comparison.compute.group
        return group if isinstance(group, Ranks) else None

    @property
    def by_owners(self) -> bool:
        """Whether ranks may keep velocities of points that move as features, by nothing else."""
        in_features = isinstance(self.flow.space, FeatureSpace)
        comparison = self.comparison
        euclidean = comparison.ground.ground == "sqeuclidean" and comparison.target_scale is None
        euclidean = euclidean and not has_sets((self.source, self.target))
        return self.ranks is not None and in_features and euclidean and not self.functionals

    def at(self, features: Tensor) -> LabeledSamples:
        """Return the particles with new features (n, d), finite and of the type of the first."""
        return displaced(self.source, features)

    def mean_cost(self, features: Tensor, class_distances: ClassDistances) -> float:
        """Return sum_ij a_i b_j C_ij of the particles with features (n, d), without any solve.

        With c the target's mean it is lambda_x (sum_i a_i ||x_i - c||^2 + sum_j b_j ||y_j - c||^2)
        plus the part of the classes. It is finite only if all features are.
        """
        sides, cost = (self.source, self.target), self.comparison.ground
        if self.comparison.target_scale is not None or has_sets(sides):
            moved = self.comparison.with_points(self.at(features), self.target)
            return moved.with_classes(class_distances.full).mean_cost()
        centre, spread = self._target_moments
        squares = self.masses @ squared_distances(features, centre)
        own, theirs = self._class_masses
        # Both summands are on the CPU.
        fixed = cost.squared.lambda_x * spread + cost.lambda_y * (own @ class_distances.xy @ theirs)
        return float(cost.squared.lambda_x * squares + fixed)

    def settings(
        self, points: LabeledSamples, goal: LabeledSamples, table: ClassDistances
    ) -> dict[str, Any]:
        """Return what a resumed flow must find again, by command-line keys.

        Args:
            points: the particles at the start, before the cost sees them.
            goal: the target, before the cost sees it.
            table: W at the start.
        """
        metric, compute = self.metric, self.comparison.compute
        labels = metric.to_dict()
        if isinstance(metric, Given | PairFunction):
            # These metrics are identified by their values alone.
            labels = {"given": content_hash({"W": table.full})}
        types = [torch.promote_types(s.features.dtype, torch.float32) for s in (points, goal)]
        penalties = penalties_of(self.comparison.constraints)
        solver = asdict(self.solver)
        del solver["require_convergence"]
        return {
            "source": points.fingerprint,
            "target": goal.fingerprint,
            # Fingerprints depend on values only, but steps also on the type.
            "source.type": str(types[0]).removeprefix("torch."),
            "target.type": str(types[1]).removeprefix("torch."),
            "labels.method": metric.name,
            **{f"labels.{key}": value for key, value in labels.items()},
            "epsilon": self.comparison.epsilon,
            **({} if penalties is None else {"unbalanced": penalties}),
            **self.comparison.ground.to_dict(),
            "solver.schedule": self.solver.name,
            **{f"solver.{key}": value for key, value in solver.items()},
            "backend": compute.backend,
            "precision": compute.precision,
            **self.flow.settings,
        }

    @cached_property
    def _target_moments(self) -> tuple[Tensor, Tensor]:
        """The target's mean (d,), and its mean squared distance from it on the CPU, float64."""
        comparison = self.comparison
        points, masses = comparison.given_points(1), self.target.masses.to(comparison.device)
        centre = weighted_mean(points, masses)
        return centre, (masses @ squared_distances(points, centre)).cpu()

    @cached_property
    def _class_masses(self) -> tuple[Tensor, Tensor]:
        """The class masses of particles (V_x,) and target (V_y,), float64, on the CPU.

        Unlabelled samples are one class.
        """
        own, theirs = (
            mass_per_class(side.masses, class_indices(side), side.class_total).cpu()
            for side in (self.source, self.target)
        )
        return own, theirs

    @property
    def movers(self) -> str:
        """The settings to lower if particles move too far, as text with their keys."""
        stepping = self.flow.stepping
        movers = [f"flow.step_size={stepping.step_size:g}"]
        if stepping.noise:
            movers.append(f"flow.noise={stepping.noise:g}")
        movers += [f"the weight {part.weight:g} of {part.name}" for part in self.functionals]
        return " or ".join(movers)


class TargetDivergence:
    """The divergence between moving particles and a fixed target, with warm starts.

    Args:
        setting: how to solve and when to stop.
    """

    def __init__(self, setting: FlowSetting) -> None:
        self._setting = setting
        self._self_term: TransportTerm | None = None
        # Potentials of the last solve, and of the one before.
        self._potentials: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}

    def __call__(
        self,
        comparison: Comparison,
        needs: Needs,
        batch: Batch | None = None,
    ) -> tuple[Divergence, Gradient]:
        """Solve, and differentiate by `needs`, where "x" is the features of the particles.

        Args:
            comparison: of n particles and the target, which is the same in every call; of its class
                distances only the rows of the particles' classes may change.
            needs: inputs of the divergence, as in `DivergenceGradient`.
            batch: solve between these rows only, without a warm start; the gradient then is (b, d).

        Raises:
            ConvergenceError: the solver's options require convergence, and a term stopped early.
        """
        particles, target = comparison.given
        if batch is not None:
            rows = particles.take(batch.particles), target.take(batch.target)
            comparison = comparison.with_points(*rows)
        gradient = DivergenceGradient(comparison, needs)
        solved = self._solved(comparison, gradient if needs else None, whole=batch is None)
        return solved, gradient.total

    def by_owners(self, comparison: Comparison) -> tuple[Divergence, OwnedVelocity | Tensor]:
        """Solve as above, with velocities of the particles whose rows stay with their ranks.

        Raises:
            ConvergenceError: as above.
        """
        ranks = self._setting.ranks
        assert ranks is not None
        gradient = OwnedGradient(comparison, ranks)
        solved = self._solved(comparison, gradient, whole=True)
        with torch.no_grad():
            return solved, gradient.velocity(self._setting.masses)

    def _solved(
        self, comparison: Comparison, differentiate: Solved | None, *, whole: bool
    ) -> Divergence:
        """Solve, from the potentials of the last steps if these were of all points too."""
        setting, yy = self._setting, self._self_term
        with torch.no_grad():
            solved = solve(
                comparison,
                setting.solver,
                start=self._start() if whole else None,
                known={"yy": yy} if whole and yy is not None and yy.converged else {},
                progress=setting.callbacks.solver_progress,
                solved=differentiate,
            )
        if setting.solver.require_convergence:
            report_convergence(solved, setting.solver)
        if not whole:
            # After steps on batches, the potentials of the last full solve are far off.
            self._potentials = self._earlier = {}
        elif not solved.identical:
            assert solved.xx is not None
            self._self_term = solved.yy
            self._earlier = self._potentials
            self._potentials = {"xy": solved.xy.g, "xx": solved.xx.f}
        return solved

    def state(self) -> dict[str, Any]:
        """Return the potentials and self term that the next solve starts from."""
        return {"last": self._potentials, "earlier": self._earlier, "yy": self._self_term}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state`, which may be on another device."""
        device, term = self._setting.comparison.device, state["yy"]
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


# Steps overshoot if the mean cost is this many times that of the start. A converging flow ends at
# about twice the start at most, if particles began as one point and spread over the target.
DIVERGED = 10.0
# Mean costs below this share of the target's mean squared norm count as 0.
RESOLUTION = 1e-6

# The name of the mean cost in messages, and the message for points that overflowed.
MEAN_COST = "the mean cost"
NOT_FINITE = "particles have values that are not finite"


class Overshot(InputError):
    """Particles ran away: step size, noise or functionals are too large."""


class Found(NamedTuple):
    """The result of an evaluation, with the features (n, d) at which it was made."""

    record: StepRecord
    velocities: dict[str, Tensor | OwnedVelocity]
    features: Tensor
    divergence: Divergence
    batch: Batch | None


class Evaluator:
    """Evaluates the particles of a flow.

    Args:
        setting: the problem.
        mode: the mode of the flow, at its start.
    """

    def __init__(self, setting: FlowSetting, mode: Mode) -> None:
        self._setting, self._mode, self._stepping = setting, mode, setting.flow.stepping
        self._space = setting.flow.space
        # The mean cost at the start: the scale on which particles count as run away.
        self._mean_cost = setting.mean_cost(setting.source.features, mode.class_distances)
        # Clouds that start at distance 0 move only by rounding, so the limit must not be 0.
        comparison, target = setting.comparison, setting.target
        norms = squared_norms(comparison.given_points(1))
        square = float(target.masses.to(comparison.device) @ norms)
        resolved = RESOLUTION * comparison.ground.squared.lambda_x * square
        self._far = max(DIVERGED * self._mean_cost, resolved)
        self._massive = [side.masses.nonzero().squeeze(1) for side in (setting.source, target)]
        # The rows of each side that a step uses; None if these are all.
        self._size = self._stepping.minibatch
        if self._size is not None and all(self._size >= len(rows) for rows in self._massive):
            self._size = None

    @property
    def estimates(self) -> bool:
        """Whether steps use a minibatch or displaced points instead of all points."""
        return self._size is not None or self._stepping.noise > 0

    def __call__(self, points: Tensor, step: int, *, whole: bool = False) -> Found:
        """Evaluate the objective at points (n, p), and the velocities along which it grows.

        Args:
            points: the particles after `step` steps.
            step: k >= 0, which determines the random draws.
            whole: use all points without noise, and current class distances.

        Raises:
            Overshot: a value is not finite, or particles have run away.
            InputError: no solve is possible.
        """
        setting, mode = self._setting, self._mode
        noise, given = 0.0 if whole else self._stepping.noise, points
        if noise > 0:
            points = points + noise * normal_like(points, self._draw(step, Draw.PERTURBATION))
        features = self._space.features(points)
        cost = setting.mean_cost(features, mode.class_distances)
        if not math.isfinite(cost):
            # The sum may overflow for finite points that are far away.
            if not all_finite(given):
                raise Overshot(NOT_FINITE)
            if features is not given and not all_finite(features):
                raise Overshot("particles have features that are not finite")
        self._check_nearness(cost, f" moved by flow.noise={noise:g}" if noise else "")
        if step > 0 and (whole or self.measured_at(step)):
            mode.measure(features)
        batch = None if whole else self._batch(step)
        try:
            solved, by_features, by_variables = mode.evaluate(features, batch)
        except InputError as error:
            # If particles are far away, the steps are to blame for an impossible solve.
            if not cost <= self._far:
                raise Overshot(str(error)) from error
            raise
        values: dict[str, float] = {}
        if isinstance(by_features, OwnedVelocity):
            velocity: Tensor | OwnedVelocity = by_features
            sizes = by_features.largest, by_features.norm
        else:
            velocity = self._space.pull_back(points, by_features)
            if setting.functionals:
                values, extra = self._functionals(points)
                velocity = velocity + (extra if batch is None else batch.only(extra))
            sizes = largest_entry(velocity), self._norm(velocity, batch)
        finite = math.isfinite(solved.value + sum(values.values()))
        # One transfer to the CPU for both.
        largest, norm = torch.stack(sizes).tolist()
        if not finite or not math.isfinite(largest):
            raise Overshot("the objective or its gradient is not finite")
        self._check_nearness(solved.value)
        seen = len(setting.source) if batch is None else len(batch.particles)
        whole_seen = batch is None and noise == 0
        record = self._record(step, solved, values, norm, None if whole_seen else seen)
        return Found(record, {"points": velocity, **by_variables}, features, solved, batch)

    def measured_at(self, step: int) -> bool:
        """Return whether the flow recomputes class distances after `step` steps."""
        return step % self._setting.flow.refresh == 0

    def expected_seconds(self, points: Tensor, step: int) -> float:
        """Estimate the seconds that class distances take for the rest of a flow, points (n, p)."""
        features = self._space.features(points)
        whole = part = self._mode.expected_seconds(features)
        if self.estimates:
            part = self._mode.expected_seconds(features, self._batch(step))
        return part * (self._setting.flow.steps - step) + whole * (1 + self.estimates)

    def check_box(self, points: Tensor) -> None:
        """Refuse a box that excludes the particles (n, p) of the start.

        Raises:
            InputError: no coordinate of a particle lies in the box, or clamping to it alone moves
                them as far as steps that overshoot.
        """
        box = self._stepping.box
        if box is None or self._setting.functionals:
            return
        inside = points.clamp(*box)
        if torch.equal(inside, points):
            return
        cost = self._mean_cost_of(inside)
        if bool((inside != points).all()) or not cost <= self._far:
            raise InputError(
                f"flow.box=[{box[0]:g}, {box[1]:g}] leaves out the particles, whose coordinates "
                f"lie in [{float(points.min()):.4g}, {float(points.max()):.4g}]: it takes them to "
                f"a mean cost of {cost:.4g} from the target, and they are at "
                f"{self._mean_cost:.4g}; give a box that holds both datasets, or flow.box=null"
            )

    def check_reach(self, points: Tensor) -> None:
        """Refuse points (n, p) that a step has led far out of the box, before they are clamped.

        Raises:
            Overshot: under the same condition as without a box.
        """
        box = self._stepping.box
        assert box is not None
        width = box[1] - box[0]
        # Within a box's width around the box nothing has run away; features may be expensive.
        if bool(((points > box[0] - width) & (points < box[1] + width)).all()):
            return
        how = f" that a step took out of flow.box=[{box[0]:g}, {box[1]:g}]"
        self._check_nearness(self._mean_cost_of(points), how)

    def beginning(self, points: Tensor) -> dict[str, float]:
        """Return numbers that distinguish user functions, of which settings know only the names.

        Args:
            points: (n, p), the particles at the start.

        Returns:
            The mean cost of the start, which depends on the space of the particles, and the value
            of each functional there.
        """
        source = self._setting.source
        functionals = self._setting.functionals
        values, _ = value_and_velocity(functionals, points, source.labels, source.masses)
        found = {f"functional {name}": value for name, value in values.items()}
        return {MEAN_COST: self._mean_cost, **found}

    def _mean_cost_of(self, points: Tensor) -> float:
        return self._setting.mean_cost(self._space.features(points), self._mode.class_distances)

    def _functionals(self, points: Tensor) -> tuple[dict[str, float], Tensor]:
        masses, labels = self._setting.masses, self._mode.labels()
        try:
            return value_and_velocity(self._setting.functionals, points, labels, masses)
        except UserCodeError:
            raise
        except InputError as error:
            # At the start a functional's error is its own; later the points have gone too far.
            raise Overshot(str(error)) from error

    def _check_nearness(self, cost: float, how: str = "") -> None:
        """Refuse a cost far above that of the start, unless functionals may lead that far.

        `how` describes what moved the particles there.
        """
        if not self._setting.functionals and not cost <= self._far:
            raise Overshot(
                f"particles{how} are at a mean cost of {cost:.4g} from the target, and began at "
                f"{self._mean_cost:.4g}"
            )

    def _record(
        self,
        step: int,
        solved: Divergence,
        values: dict[str, float],
        gradient_norm: float,
        estimated_on: int | None,
    ) -> StepRecord:
        whole, (lower, upper) = estimated_on is None, solved.bounds
        return StepRecord(
            step=step,
            objective=solved.value + sum(values.values()) if whole else None,
            divergence=solved.value if whole else None,
            lower=lower if whole else None,
            upper=upper if whole else None,
            functionals=values,
            gradient_norm=gradient_norm,
            step_size=self._stepping.step_size_at(step, self._setting.flow.steps),
            iterations=solved.xy.iterations,
            marginal_error=solved.marginal_error,
            tolerance=solved.tolerance,
            converged=solved.converged,
            stopped_by=solved.stopped_by,
            seconds=0.0,
            estimate=None if whole else solved.value,
            estimated_on=estimated_on,
            bound_width=solved.bound_width if math.isfinite(solved.bound_width) else None,
        )

    def _norm(self, velocity: Tensor, batch: Batch | None) -> Tensor:
        """Return (sum_i a_i |v_i|^2)^1/2 over the particles that a step uses."""
        masses = self._setting.masses
        if batch is not None:
            masses, velocity = masses[batch.particles], velocity[batch.particles]
            masses = masses / masses.sum()
        speeds: Tensor = torch.linalg.vector_norm(velocity, dim=1)
        return (masses @ speeds.double().square()).sqrt()

    def _batch(self, step: int) -> Batch | None:
        """Return the rows that a step uses; None for all of them."""
        if self._size is None:
            return None
        draw = self._draw(step, Draw.MINIBATCH)
        return Batch(*(_some(rows, self._size, draw) for rows in self._massive))

    def _draw(self, step: int, purpose: Draw) -> torch.Generator:
        return generator(self._setting.flow.seed, step, purpose)


def _some(rows: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """Return `size` of the rows, or all if there are fewer, in their order."""
    chosen = torch.randperm(len(rows), generator=draw)[:size].sort().values
    return rows[chosen.to(rows.device)]
