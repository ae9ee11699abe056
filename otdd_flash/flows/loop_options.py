"""What the loop of a flow does beside descending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otdd_flash.flows.callbacks import Callbacks
from otdd_flash.flows.flow import Flow
from otdd_flash.flows.functionals import WeightedFunctional


@dataclass(frozen=True, eq=False)
class LoopOptions:
    """What a loop does beside descending.

    Attributes:
        flow: how far to go, where the state is kept, and what else was asked for.
        functionals: those of the flow, built.
        settings: what a checkpoint belongs to.
        callbacks: told of every record, and asked after every evaluation whether to end here.
    """

    flow: Flow
    functionals: Sequence[WeightedFunctional]
    settings: Mapping[str, Any]
    callbacks: Callbacks

    @property
    def movers(self) -> str:
        """The settings that lead particles, by their keys: what to lower where they go too far."""
        movers = [f"flow.step_size={self.flow.stepping.step_size:g}"]
        if self.flow.stepping.noise:
            movers.append(f"flow.noise={self.flow.stepping.noise:g}")
        movers += [f"the weight {part.weight:g} of {part.name}" for part in self.functionals]
        return " or ".join(movers)

    @property
    def what_to_lower(self) -> str:
        """Advice for a flow whose steps overshoot."""
        advice = f"lower {self.movers} and start again"
        checkpoints = self.flow.checkpoints
        if checkpoints is None:
            return advice
        return (
            f"{advice}, or go on from before that step, which {checkpoints.folder} holds, by "
            "flow.resume=true with a lower flow.step_size"
        )
