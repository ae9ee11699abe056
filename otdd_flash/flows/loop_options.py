"""What the loop of a flow does beside descending."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.stepping import Stepping


@dataclass(frozen=True, eq=False)
class LoopOptions:
    """What a loop does beside descending.

    Attributes:
        steps: to take in all.
        stepping: how.
        functionals: what the objective has beside the divergence.
        tolerance: stop once a step changes the objective by less than this share of its first
            value; None never.
        seed: of every draw.
        checkpoints: where the state is kept; None nowhere.
        settings: what a checkpoint belongs to.
        keep_moments: keep what every step saw, n (d + 2) + m numbers each.
        progress: told of every record.
        stop: asked after every evaluation whether to end here.
    """

    steps: int
    stepping: Stepping
    functionals: Sequence[WeightedFunctional]
    tolerance: float | None
    seed: int
    checkpoints: Checkpoints | None
    settings: Mapping[str, Any]
    keep_moments: bool
    progress: Callable[[StepRecord], None] | None
    stop: Callable[[], bool] | None

    @property
    def movers(self) -> str:
        """The settings that lead particles, by their keys: what to lower where they go too far."""
        movers = [f"flow.step_size={self.stepping.step_size:g}"]
        if self.stepping.noise:
            movers.append(f"flow.noise={self.stepping.noise:g}")
        movers += [f"the weight {part.weight:g} of {part.name}" for part in self.functionals]
        return " or ".join(movers)

    @property
    def what_to_lower(self) -> str:
        """Advice for a flow whose steps overshoot."""
        advice = f"lower {self.movers} and start again"
        if self.checkpoints is None:
            return advice
        return (
            f"{advice}, or go on from before that step, which {self.checkpoints.folder} holds, by "
            "flow.resume=true with a lower flow.step_size"
        )
