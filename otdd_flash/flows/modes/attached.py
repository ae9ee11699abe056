"""Mode `attached`: the points move along the whole gradient, that of class distances included.

dx_i / dt = -(1 / a_i) (dS/dx_i + sum_kl dS/dW_kl dW_kl/dx_i),      W = W(x)

The feature-driven flow (fd) of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in
Probability Space, where W is a function of the particles and not a constant: this is the gradient
flow of the dataset distance itself. W is measured at every step, whatever `refresh` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.flows.class_table import ClassTable
from otdd_flash.flows.divergence import Batch
from otdd_flash.flows.modes.base import Evaluation, Mode, per_mass, require_moments
from otdd_flash.flows.setting import FlowSetting
from otdd_flash.labels import ClassDistances


class AttachedMode(Mode):
    """See the module.

    Raises:
        InputError: class distances are not measured by `gaussian` or `means`.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        require_moments("attached", setting)
        super().__init__(setting, table)
        self._classes = ClassTable(setting.target, setting.metric)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """The divergence at the class distances of now, and its whole gradient."""
        setting, before = self._setting, self.class_distances
        moving = features.detach().requires_grad_()
        table = self._classes.differentiable(setting.at(moving), before.yy)
        self.class_distances = ClassDistances.from_full(
            table, before.xx.shape[0], before.names_x, before.names_y
        )
        solved, gradient = self._divergence(
            setting.at(features), table.detach(), frozenset({"x", "classes"}), batch
        )
        (through_classes,) = torch.autograd.grad(table, moving, gradient["classes"].to(table))
        if batch is not None:
            # Class distances depend on all particles, but those outside the batch rest.
            through_classes = batch.only(through_classes)
        direct = self._feature_velocity(gradient["x"], batch)
        return Evaluation(solved, direct + per_mass(through_classes, setting.source.masses), {})
