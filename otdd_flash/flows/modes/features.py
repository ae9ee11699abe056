"""Mode `features`: the points move, class distances follow them as constants.

dx_i / dt = -(1 / a_i) dS_epsilon(x, y; W) / dx_i,    W = W(x), measured every `refresh` steps

The feature-driven flow (fd) of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in
Probability Space: a particle keeps its label, and a class is where its particles are. How W changes
with x is not differentiated; mode `attached` does that.
"""

from __future__ import annotations

from torch import Tensor

from otdd_flash.flows.class_table import ClassTable
from otdd_flash.flows.divergence import Batch
from otdd_flash.flows.modes.base import Evaluation, Mode
from otdd_flash.flows.setting import FlowSetting
from otdd_flash.labels import ClassDistances


class FeaturesMode(Mode):
    """See the module."""

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        super().__init__(setting, table)
        self._classes = ClassTable(setting.target, setting.metric)

    def measure(self, features: Tensor) -> None:
        """Measure the distances between the classes of particles with features (n, d)."""
        particles = self._setting.at(features)
        self.class_distances = self._classes.remeasured(particles, self.class_distances)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """The divergence at the class distances last measured."""
        particles, table = self._setting.at(features), self.class_distances.full
        solved, gradient = self._divergence(particles, table, frozenset({"x"}), batch)
        return Evaluation(solved, self._feature_velocity(gradient["x"], batch), {})
