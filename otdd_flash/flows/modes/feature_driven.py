"""Modes `features` and `attached`: the points move, and class distances follow from them.

features    dx_i / dt = -(1 / a_i) dS_epsilon(x, y; W) / dx_i,     W = W(x), every `refresh` steps
attached    dx_i / dt = -(1 / a_i) (dS/dx_i + sum_kl dS/dW_kl dW_kl/dx_i),     W = W(x), every step

They are the feature-driven flow (fd) of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient
Flows in Probability Space: a particle keeps its label, and a class is where its particles are. Mode
`features` does not differentiate how W changes with x; `attached` does, and is the gradient flow of
the dataset distance itself.

`flows.modes` builds them. `ClassTable` computes W at the current positions; what depends on the
target alone is computed once, with the same result to the last bit as a new computation, because a
resumed flow computes it again and must take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.flows.modes.base import Evaluation, Mode, beside, per_mass, require_moments
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.flows.stepping import Batch
from otdd_flash.labels import ClassDistances, Gaussian, LabelMetric
from otdd_flash.labels.classes import ClassCloud, merge_identical, pool
from otdd_flash.labels.gaussian import (
    ClassMoments,
    class_moments,
    diagonal_gaussian_table,
    moments_table,
)
from otdd_flash.labels.many import class_names
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.moments import mean_table
from otdd_flash.labels.pairs import all_pairs, symmetric_table
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.term_gradient import Needs


class FeaturesMode(Mode):
    """Mode `features`: class distances are constant between two updates."""

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        super().__init__(setting, table)
        self._classes = ClassTable(setting.target, setting.metric)
        # Checked blocks of W, and the table they were made from.
        self._blocks, self._blocks_of = setting.blocks(table.full), table

    def measure(self, features: Tensor) -> None:
        particles = self._setting.at(features)
        self.class_distances = self._classes.remeasured(particles, self.class_distances)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at the class distances of the last update."""
        setting, table = self._setting, self.class_distances
        if table is not self._blocks_of:
            self._blocks, self._blocks_of = setting.blocks(table.full), table
        needs: Needs = frozenset({"x"})
        solved, gradient = self._divergence(setting.at(features), self._blocks, needs, batch)
        return Evaluation(solved, self._feature_velocity(gradient["x"], batch), {})


class AttachedMode(Mode):
    """Mode `attached`: the gradient includes that of class distances.

    Raises:
        InputError: the metric between classes is not `gaussian` or `means`.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        require_moments("attached", setting)
        super().__init__(setting, table)
        self._classes = ClassTable(setting.target, setting.metric)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at current class distances, with its full gradient."""
        setting, moving = self._setting, features.detach().requires_grad_()
        table = self._classes.differentiable(setting.at(moving), self.class_distances.yy)
        self._keep(table)
        solved, direct, (through_classes,) = self._solve(
            setting.at(features), table, [moving], batch
        )
        if batch is not None:
            # Class distances depend on all particles, but those outside the batch do not move.
            through_classes = batch.only(through_classes)
        return Evaluation(solved, direct + per_mass(through_classes, setting.masses), {})


class ClassTable:
    """Computes W between moving and fixed classes; parts of the target alone are computed once.

    Distances within the target are constant. With full covariances, the target's factors are stored
    from the first computation on: d min(n_c, d) float64 numbers for a class of n_c points in d
    dimensions. The table is the same to the last bit as without stored factors.

    Args:
        target: the fixed side.
        metric: the metric between classes.
    """

    def __init__(self, target: LabeledSamples, metric: LabelMetric) -> None:
        self._target, self._metric = target, metric
        # The metric if covariances are full, else None.
        self._full = metric if isinstance(metric, Gaussian) and not metric.diagonal else None
        self._kept: list[ClassMoments] | None = None

    def remeasured(self, particles: LabeledSamples, before: ClassDistances) -> ClassDistances:
        """Return the distances of moved classes; those within the target are taken from `before`.

        Raises:
            InputError: a class of the particles is too small or too large for the method.
        """
        target = self._target
        if self._metric.fixed:
            return before
        particles = self._beside(particles)
        clouds, (_, own, _) = pool([particles, target])
        distinct, index = merge_identical(clouds)
        moved = torch.zeros(len(distinct), dtype=torch.bool)
        moved[index[:own]] = True
        pairs = all_pairs(len(distinct))
        pairs = pairs[moved[pairs].any(1)]
        if self._full is not None:
            with torch.no_grad():
                moments = self._moments(distinct, clouds[own:], self._full.unbiased)
                values = moments_table(moments, pairs)
        else:
            values = measure_pairs(distinct, pairs, self._metric).values
        full = symmetric_table(values.cpu(), pairs, len(distinct))[index][:, index]
        full[own:, own:] = before.yy
        return ClassDistances.from_full(full, own, class_names(particles), class_names(target))

    def differentiable(self, particles: LabeledSamples, within_target: Tensor) -> Tensor:
        """Return W (V_x + V_y, V_x + V_y) by `Gaussian` or `Means`, differentiable by features.

        Args:
            particles: n points whose features may require a gradient.
            within_target: the block (V_y, V_y).
        """
        clouds, (_, own, total) = pool([self._beside(particles), self._target])
        pairs = all_pairs(total)
        pairs = pairs[(pairs < own).any(1)]
        if self._full is not None:
            moments = self._moments(clouds, clouds[own:], self._full.unbiased)
            values = moments_table(moments, pairs)
        elif isinstance(self._metric, Gaussian):
            values = diagonal_gaussian_table(clouds, pairs, self._metric.unbiased)
        else:
            values = mean_table(clouds, pairs)
        return symmetric_table(values, pairs, total) + beside(own, within_target.to(values))

    def _beside(self, particles: LabeledSamples) -> LabeledSamples:
        """Move the particles to the target's device; a target that streams is in host memory."""
        home = self._target.features.device
        return particles if particles.features.device == home else particles.to(home)

    def _moments(
        self, clouds: Sequence[ClassCloud], target: Sequence[ClassCloud], unbiased: bool
    ) -> list[ClassMoments]:
        """Compute the moments of classes; those of the target's classes only once."""
        if self._kept is None:
            with torch.no_grad():
                self._kept = class_moments(target, unbiased)
        known = dict(zip(target, self._kept, strict=True))
        moving = [cloud for cloud in clouds if cloud not in known]
        known |= zip(moving, class_moments(moving, unbiased), strict=True)
        return [known[cloud] for cloud in clouds]
