"""What a mode of a flow is: which variables move beside the features, and how fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.divergence import Batch, FlowSetting, TargetDivergence
from otdd_flash.labels import ClassDistances, Gaussian, Means
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence


class Evaluation(NamedTuple):
    """A divergence, and the direction in which every variable makes it grow fastest.

    Attributes:
        divergence: S_epsilon of the particles and the target.
        features: (n, d) = (1 / a_i) dS / dx_i; 0 for particles without mass.
        variables: likewise for the mode's own variables, each divided by the mass it stands for.
    """

    divergence: Divergence
    features: Tensor
    variables: dict[str, Tensor]


class Mode(ABC):
    """One way to let a labelled dataset flow; by default labels and their distances stay.

    Args:
        setting: the problem.
        table: W of the particles at the start and the target.

    Attributes:
        variables: what moves beside the features, by name; the stepper changes them in place.
        class_distances: W as the last evaluation saw it.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        self.variables: dict[str, Tensor] = {}
        self.class_distances = table
        self._setting, self._divergence = setting, TargetDivergence(setting)

    # Most modes have nothing to measure.
    def measure(self, features: Tensor) -> None:  # noqa: B027
        """Measure class distances at features (n, d), where they are neither fixed nor variables.

        Raises:
            InputError: a class is too small or too large for the method.
        """

    @abstractmethod
    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """The divergence of particles with features (n, d).

        With a batch, that of its rows; velocities of features are 0 elsewhere.

        Raises:
            ConvergenceError: a term stopped early and the solver's options require convergence.
        """

    def expected_seconds(self, features: Tensor, batch: Batch | None = None) -> float:
        """About how long class distances take at an evaluation; 0 where that is next to nothing."""
        return 0.0

    def labels(self) -> Tensor | None:
        """The particles' class indices (n,), or None for unlabelled ones."""
        return self._setting.source.labels

    def state(self) -> dict[str, Any]:
        """What the next evaluation needs and `variables` does not hold."""
        return {"table": self.class_distances, "divergence": self._divergence.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
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
            table: W (V_x + V_y, V_x + V_y), with its way back to `moving`.
            moving: tensors z.
            batch: solve between these rows only.

        Returns:
            S, (1 / a_i) dS / dx_i (n, d) at constant W, and sum_kl dS/dW_kl dW_kl/dz for each z.
        """
        solved, gradient = self._divergence(
            particles, table.detach(), frozenset({"x", "classes"}), batch
        )
        through_classes = torch.autograd.grad(table, moving, gradient["classes"].to(table))
        return solved, self._feature_velocity(gradient["x"], batch), through_classes

    def _keep(self, table: Tensor) -> None:
        """Keep W (V_x + V_y, V_x + V_y) as what an evaluation saw."""
        before = self.class_distances
        self.class_distances = ClassDistances.from_full(
            table, len(before.xx), before.names_x, before.names_y
        )

    def _masses(self, batch: Batch | None) -> Tensor:
        """The particles' masses (n,) in a solve; those of a batch's rows sum to 1."""
        masses = self._setting.masses
        return masses if batch is None else masses / masses[batch.particles].sum()

    def _feature_velocity(self, gradient: Tensor, batch: Batch | None) -> Tensor:
        """(1 / a_i) dS / dx_i (n, d) from a solve's dS / dx_i, (b, d) of a batch's rows."""
        if batch is not None:
            rows = gradient.new_zeros(len(self._setting.source), gradient.shape[1])
            gradient = rows.index_copy_(0, batch.particles, gradient)
            return per_mass(gradient, self._masses(batch))
        # Nobody else has it, and it is as large as the features.
        return gradient.mul_(self._inverse_masses.unsqueeze(1))

    @cached_property
    def _inverse_masses(self) -> Tensor:
        """1 / a_i (n,) of the particles, in the type of their features."""
        return inverse(self._setting.masses).to(self._setting.source.features.dtype)


def per_mass(gradient: Tensor, masses: Tensor) -> Tensor:
    """(1 / a_i) dS / dz_i for rows z_i: steps along it do not depend on n; 0 where a_i is 0."""
    return gradient * inverse(masses).to(gradient).reshape(-1, *(1,) * (gradient.ndim - 1))


def inverse(masses: Tensor) -> Tensor:
    """1 / a_i, and 0 where a_i is 0."""
    return torch.where(masses > 0, 1 / masses, 0)


def require_moments(mode: str, setting: FlowSetting) -> None:
    """Raise an `InputError` unless class distances follow from moments, and so have gradients."""
    if not isinstance(setting.metric, Gaussian | Means):
        raise InputError(
            f"flow.mode={mode} works with labels=gaussian and labels=means, got "
            f"labels={setting.metric.name}; flow.mode=features takes any method"
        )
