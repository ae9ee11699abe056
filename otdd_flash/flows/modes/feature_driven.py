"""Modes `features` and `attached`: the points move, and class distances follow from them.

features    dx_i / dt = -(1 / a_i) dS_epsilon(x, y; W) / dx_i,     W = W(x), every `refresh` steps
attached    dx_i / dt = -(1 / a_i) (dS/dx_i + sum_kl dS/dW_kl dW_kl/dx_i),     W = W(x), every step

They are the feature-driven flow (fd) of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient
Flows in Probability Space: a particle keeps its label, and a class is where its particles are. Mode
`features` does not differentiate how W changes with x; `attached` does, and is the gradient flow of
the dataset distance itself.

`flows.modes` names them. Both compute W at the current positions; what depends on the target alone
is computed once, with the same result to the last bit as a new computation, because a
resumed flow computes it again and must take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.flows.modes.base import Evaluation, Mode, beside, per_mass, require_moments
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.flows.stepping import Batch
from otdd_flash.labels import ClassDistances, Gaussian
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


class FeatureDrivenMode(Mode):
    """The common part of both modes: W between moving and fixed classes.

    Distances within the target are constant. With full covariances, the target's factors are stored
    from the first computation on: d min(n_c, d) float64 numbers for a class of n_c points in d
    dimensions. The table is the same to the last bit as without stored factors.
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
            InputError: a class of the particles is too small or too large for the method.
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
