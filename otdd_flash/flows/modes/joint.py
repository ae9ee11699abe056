"""Mode `joint`: points, class means and class covariances move as independent variables.

dx_i / dt = -(1 / a_i) dS/dx_i,   dm_k / dt = -(1 / A_k) dS/dm_k,   dF_k / dt = -(1 / A_k) dS/dF_k

with A_k the mass of class k and W_kl = ||m_k - m_l||^2 + Bures^2(F_k^T F_k, F_l^T F_l). Labels
stay. The jointly driven flow with fixed labels (jd-fl) of Alvarez-Melis and Fusi 2021, Dataset
Dynamics via Gradient Flows in Probability Space: every particle is a pair of a point and a
Gaussian, and the particles of a class share theirs, which therefore moves by the mean of their
velocities. Factors keep covariances positive semi-definite, and the flow of F is that of F^T F in
the Bures metric.
With `labels.diagonal`, F_k is a vector of standard deviations; with labels=means there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.flows.divergence import Batch, FlowSetting
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.flows.modes.base import Evaluation, Mode, per_mass, require_moments
from otdd_flash.labels import ClassDistances


class JointMode(Mode):
    """See the module; `variables` holds `means` (V, d) and `spreads` (V, r, d) or (V, d).

    Raises:
        InputError: class distances are not measured by `gaussian` or `means`.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        require_moments("joint", setting)
        super().__init__(setting, table)
        gaussians = Gaussians.of(setting.source, setting.metric)
        self._target = Gaussians.of(setting.target, setting.metric)
        self.variables = gaussians.variables

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """The divergence at the distances of the moving Gaussians, by all variables."""
        moving = self._moving()
        table = Gaussians.from_variables(moving).table(self._target, self.class_distances.yy)
        self._keep(table)
        solved, by_features, parts = self._solve(
            self._setting.at(features), table, [*moving.values()], batch
        )
        masses = self._class_masses(batch)
        velocities = (per_mass(part, masses) for part in parts)
        return Evaluation(solved, by_features, dict(zip(moving, velocities, strict=True)))

    def _class_masses(self, batch: Batch | None) -> Tensor:
        """The mass A_k (V,) of every class, that of particles outside the batch included.

        They rest, and a class moves by the mean of all its particles.
        """
        labels = self._setting.source.labels
        assert labels is not None
        classes = len(self.variables["means"])
        return torch.bincount(labels, weights=self._masses(batch), minlength=classes)
