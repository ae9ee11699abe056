"""The base class of a flow's modes: which variables move besides the features, and how fast.

`flows.modes.feature_driven` and `flows.modes.jointly_driven` derive from `Mode`; `flows.run` and
`flows.objective` only use its interface. `flows.stepping` changes `variables` in place, so a mode
must not replace these tensors. What the next evaluation needs besides them must be in `state`,
which checkpoints store, so that a resumed flow takes the same steps.
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
from otdd_flash.flows.owned_velocity import OwnedVelocity
from otdd_flash.flows.stepping import Batch
from otdd_flash.labels import ClassDistances, Gaussian, Means
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
        class_distances: W of the last evaluation.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        self.variables: dict[str, Tensor] = {}
        self.class_distances = table
        self._setting, self._divergence = setting, TargetDivergence(setting)

    # Most modes have nothing to measure.
    def measure(self, features: Tensor) -> None:  # noqa: B027
        """Recompute class distances at features (n, d), if they are neither fixed nor variables.

        Raises:
            InputError: a class is too small or too large for the method.
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
