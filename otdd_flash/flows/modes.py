"""The modes of a flow: the base class, and those in which points alone move.

A mode says which variables move besides the features, and how fast. In the modes of this file none
do, and class distances are computed from the moved points:

features    dx_i / dt = -(1 / a_i) dS_epsilon(x, y; W) / dx_i,     W = W(x), every `refresh` steps
attached    dx_i / dt = -(1 / a_i) (dS/dx_i + sum_kl dS/dW_kl dW_kl/dx_i),     W = W(x), every step

They are the feature-driven flow (fd) of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient
Flows in Probability Space: a particle keeps its label, and a class is where its particles are. Mode
`features` does not differentiate how W changes with x; `attached` does, and is the gradient flow of
the dataset distance itself. Both compute W at the current positions; values of the target alone are
computed once, with the same result to the last bit as a new computation, because a resumed flow
computes them again and must take the same steps.

`flows.joint_modes` derives from `Mode` too, and uses `Evaluation`, `beside`, `per_mass` and
`require_moments`. `flows.flow` names all modes; `flows.run` and `flows.objective` only use the
interface. `flows.stepping` changes `variables` in place, so a mode must not replace these tensors.
Anything else that the next evaluation needs must be in `state`, which checkpoints store, so that a
resumed flow takes the same steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.points import per_mass_
from otdd_flash.errors import InputError
from otdd_flash.flows.objective import FlowSetting, TargetDivergence
from otdd_flash.flows.stepping import Batch, OwnedVelocity
from otdd_flash.labels import ClassDistances, Gaussian, Means
from otdd_flash.labels.gaussian import (
    ClassMoments,
    class_moments,
    diagonal_gaussian_table,
    mean_table,
    moments_table,
)
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.pairs import ClassCloud, all_pairs, merge_identical, pool, symmetric_table
from otdd_flash.labels.table import class_names
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence


class Evaluation(NamedTuple):
    """A divergence and its velocities: for each variable, the direction of steepest ascent.

    Attributes:
        divergence: S_epsilon of the particles and the target.
        features: (n, d) = (1 / a_i) dS / dx_i; 0 for particles without mass. Where
            `FlowSetting.by_owners` allows it, every rank may hold its own rows.
        variables: the same for the mode's own variables, each divided by the mass it stands for.
    """

    divergence: Divergence
    features: Tensor | OwnedVelocity
    variables: dict[str, Tensor]


class Mode(ABC):
    """A way to let a labelled dataset flow; by default labels and class distances are fixed.

    Args:
        setting: the problem.
        table: W of the particles at the start and the target.

    Attributes:
        variables: what moves besides the features, by name; the stepper changes them in place.
        class_distances: W of the last evaluation; in mode `augmented`, that of the start.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        self.variables: dict[str, Tensor] = {}
        self.class_distances = table
        self._setting, self._divergence = setting, TargetDivergence(setting)

    # Most modes have nothing to measure.
    def measure(self, features: Tensor) -> None:  # noqa: B027
        """Recompute class distances at features (n, d), if they are neither fixed nor variables.

        Raises:
            InputError: as `LabelMetric.measure`.
        """

    @abstractmethod
    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence of particles with features (n, d).

        With a batch, it is that of its rows; velocities of other features are 0.

        Raises:
            ConvergenceError: a term stopped early and the solver's options require convergence.
        """

    def expected_seconds(self, features: Tensor, batch: Batch | None = None) -> float:
        """Estimate the seconds for class distances in an evaluation; 0 if negligible."""
        return 0.0

    def labels(self) -> Tensor | None:
        """Return the particles' class indices (n,), or None for unlabelled ones."""
        return self._setting.source.labels

    def state(self) -> dict[str, Any]:
        """Return what the next evaluation needs and `variables` does not hold."""
        return {"table": self.class_distances, "divergence": self._divergence.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state`."""
        self.class_distances = state["table"]
        self._divergence.restore(state["divergence"])

    def _solve(
        self,
        particles: LabeledSamples,
        table: Tensor,
        moving: Sequence[Tensor],
        batch: Batch | None,
    ) -> tuple[Divergence, Tensor, tuple[Tensor, ...]]:
        """Solve at class distances W that depend on `moving`.

        Args:
            particles: n points.
            table: W (V_x + V_y, V_x + V_y), with its graph back to `moving`.
            moving: tensors z.
            batch: solve between these rows only.

        Returns:
            S, (1 / a_i) dS / dx_i (n, d) at constant W, and sum_kl dS/dW_kl dW_kl/dz for each z.
        """
        moved = self._setting.comparison.with_points(particles, self._setting.target)
        at_table = moved.with_classes(table.detach())
        solved, gradient = self._divergence(at_table, frozenset({"x", "classes"}), batch)
        through_classes = torch.autograd.grad(table, moving, gradient["classes"].to(table))
        return solved, self._feature_velocity(gradient["x"], batch), through_classes

    def _keep(self, table: Tensor) -> None:
        """Store W (V_x + V_y, V_x + V_y) as that of the last evaluation."""
        before = self.class_distances
        self.class_distances = ClassDistances.from_full(
            table, len(before.xx), before.names_x, before.names_y
        )

    def _masses(self, batch: Batch | None) -> Tensor:
        """Return the particles' masses (n,) in a solve; those of a batch's rows sum to 1."""
        masses = self._setting.masses
        return masses if batch is None else masses / masses[batch.particles].sum()

    def _feature_velocity(self, gradient: Tensor, batch: Batch | None) -> Tensor:
        """Return (1 / a_i) dS / dx_i (n, d) from a solve's dS / dx_i, (b, d) for a batch."""
        if batch is not None:
            rows = gradient.new_zeros(len(self._setting.source), gradient.shape[1])
            gradient = rows.index_copy_(0, batch.particles, gradient)
        # In place: nothing else uses the gradient, and it is as large as the features.
        return per_mass_(gradient, self._masses(batch))


def per_mass(gradient: Tensor, masses: Tensor) -> Tensor:
    """Return (1 / a_i) dS / dz_i for rows z_i, 0 where a_i is 0; such steps do not depend on n."""
    return per_mass_(gradient.clone(), masses)


def beside(own: int, within_target: Tensor) -> Tensor:
    """Return W (own + L, own + L) with the fixed block (L, L) and 0 elsewhere."""
    return torch.nn.functional.pad(within_target, (own, 0, own, 0))


def require_moments(setting: FlowSetting) -> None:
    """Raise an `InputError` unless class distances are functions of moments, with gradients."""
    if not isinstance(setting.metric, Gaussian | Means):
        raise InputError(
            f"flow.mode={setting.flow.mode} works with labels=gaussian and labels=means, got "
            f"labels={setting.metric.name}; flow.mode=features takes any method"
        )


class FeatureDrivenMode(Mode):
    """The common part of both modes: W between moving and fixed classes.

    Distances within the target are constant. With full covariances, the target's factors are stored
    from the first computation on: about d min(n_c, d) float64 numbers for a class of n_c points in
    d dimensions. The table is the same to the last bit as without stored factors.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        super().__init__(setting, table)
        metric = setting.metric.measured
        # The metric if covariances are full, else None.
        self._full = metric if isinstance(metric, Gaussian) and not metric.diagonal else None
        self._target_moments: list[ClassMoments] | None = None

    def _pooled(self, features: Tensor) -> tuple[LabeledSamples, list[ClassCloud], int]:
        """Return particles at features (n, d), the classes of both sides, and how many are theirs.

        They are where the target is, which in host memory may stream.
        """
        target = self._setting.target
        particles = self._setting.at(features).to(target.features.device)
        clouds, (_, own, _) = pool([particles, target])
        return particles, clouds, own

    def _full_values(
        self,
        clouds: Sequence[ClassCloud],
        target: Sequence[ClassCloud],
        pairs: Tensor,
        unbiased: bool,
    ) -> Tensor:
        """Compute distances (P,) with full covariances; moments of the target only once."""
        if self._target_moments is None:
            with torch.no_grad():
                self._target_moments = class_moments(target, unbiased)
        known = dict(zip(target, self._target_moments, strict=True))
        moving = [cloud for cloud in clouds if cloud not in known]
        known |= zip(moving, class_moments(moving, unbiased), strict=True)
        return moments_table([known[cloud] for cloud in clouds], pairs)


class FeaturesMode(FeatureDrivenMode):
    """Mode `features`: class distances are constant between two updates."""

    # The comparison at a table W, whose blocks are checked once, and that table.
    _measured: tuple[Comparison, ClassDistances] | None = None

    def measure(self, features: Tensor) -> None:
        """Recompute class distances at features (n, d), except those within the target.

        Raises:
            InputError: as `LabelMetric.measure`.
        """
        setting, before = self._setting, self.class_distances
        metric = setting.metric.measured
        if metric.fixed:
            return
        particles, clouds, own = self._pooled(features)
        distinct, index = merge_identical(clouds)
        moved = torch.zeros(len(distinct), dtype=torch.bool)
        moved[index[:own]] = True
        pairs = all_pairs(len(distinct))
        pairs = pairs[moved[pairs].any(1)]
        if self._full is not None:
            with torch.no_grad():
                values = self._full_values(distinct, clouds[own:], pairs, self._full.unbiased)
        else:
            values = measure_pairs(distinct, pairs, metric).values
        full = symmetric_table(values.cpu(), pairs, len(distinct))[index][:, index]
        names = class_names(particles), class_names(setting.target)
        if (named := setting.metric.by_names([*names[0], *names[1]])) is not None:
            full = full + named
        full[own:, own:] = before.yy
        self.class_distances = ClassDistances.from_full(full, own, *names)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at the class distances of the last update."""
        setting, table = self._setting, self.class_distances
        if self._measured is None or table is not self._measured[1]:
            self._measured = setting.comparison.with_classes(table.full), table
        moved = self._measured[0].with_points(setting.at(features), setting.target)
        if batch is None and setting.by_owners:
            return Evaluation(*self._divergence.by_owners(moved), {})
        solved, gradient = self._divergence(moved, frozenset({"x"}), batch)
        return Evaluation(solved, self._feature_velocity(gradient["x"], batch), {})


class AttachedMode(FeatureDrivenMode):
    """Mode `attached`: the gradient includes that of class distances.

    Raises:
        InputError: the metric between classes is not `gaussian` or `means`.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        require_moments(setting)
        super().__init__(setting, table)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at current class distances, with its full gradient."""
        setting, moving = self._setting, features.detach().requires_grad_()
        table = self._table(moving)
        self._keep(table)
        solved, direct, (through_classes,) = self._solve(
            setting.at(features), table, [moving], batch
        )
        if batch is not None:
            # Class distances depend on all particles, but those outside the batch do not move.
            through_classes = batch.only(through_classes)
        return Evaluation(solved, direct + per_mass(through_classes, setting.masses), {})

    def _table(self, features: Tensor) -> Tensor:
        """Return W (V_x + V_y, V_x + V_y), differentiable by features (n, d)."""
        _, clouds, own = self._pooled(features)
        pairs = all_pairs(len(clouds))
        pairs = pairs[(pairs < own).any(1)]
        metric = self._setting.metric
        if self._full is not None:
            values = self._full_values(clouds, clouds[own:], pairs, self._full.unbiased)
        elif isinstance(metric, Gaussian):
            values = diagonal_gaussian_table(clouds, pairs, metric.unbiased)
        else:
            values = mean_table(clouds, pairs)
        within_target = self.class_distances.yy.to(values)
        return symmetric_table(values, pairs, len(clouds)) + beside(own, within_target)
