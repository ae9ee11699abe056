"""How a dataset flows: what moves, how far, and what it descends beside the divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from otdd_flash import arguments
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError
from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.modes import check_mode
from otdd_flash.flows.space import FeatureSpace, Space
from otdd_flash.flows.stepping import Stepping


@dataclass(frozen=True, eq=False)
class Flow:
    """How a dataset flows; on the command line flow.KEY.

    Args:
        steps: to take.
        mode: what moves: `features`, `attached`, `joint` or `augmented`; `otdd_flash.flows.modes`
            gives the equations.
        stepping: step size, optimiser, schedule, box, noise and minibatches.
        functionals: weighted terms beside the divergence, such as {"name": "norm", "weight": 0.1};
            `build_functionals` tells what there is.
        space: from points to the features that transport sees, of both sides; by default the points
            are the features.
        refresh: steps between two measurements of class distances (mode `features`).
        tolerance: stop once a step changes the objective by less than this share of its first
            value, in (0, 1); None takes all steps.
        keep_moments: keep what every step saw, so that the result carries the flow over to new
            points by its entropic map; n (d + 2) + m numbers a step.
        seed: of every random draw.
        checkpoints: where to keep the state, and whether to go on from it; None: nowhere.

    Raises:
        InputError: no such mode, or a number out of its range.
    """

    steps: int = 20
    mode: str = "features"
    stepping: Stepping = field(default_factory=Stepping)
    functionals: Sequence[Mapping[str, Any] | WeightedFunctional] = ()
    space: Space = field(default_factory=FeatureSpace)
    refresh: int = 1
    tolerance: float | None = None
    keep_moments: bool = False
    seed: int = 0
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        check_fields(self, arguments.FLOW, "flow.")
        check_mode(self.mode)
        if self.steps < 1:
            raise InputError(f"flow.steps must be positive, got {self.steps}")
        if self.refresh < 1:
            raise InputError(
                f"flow.refresh must be positive, got {self.refresh}; 1 measures at every step"
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(
                "flow.tolerance must lie in (0, 1), a share of the first objective, got "
                f"{self.tolerance}"
            )
