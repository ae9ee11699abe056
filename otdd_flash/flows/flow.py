"""The options of a flow: what moves, how far, what it descends, and the callbacks.

`Flow` and `Callbacks` are what users and `commands.adapt` pass to `gradient_flow`;
`integrations.sklearn` builds a `Flow` too. `flows.run` and `flows.objective` read them; `flows.run`
also makes the mode and reads STREAMING_MODES.

A new mode is a class of `flows.modes.Mode`, or a function that makes one, and an entry in `MODES`.
A change must keep the names, which are values of `flow.mode` in users' settings and in saved
results. A mode belongs in STREAMING_MODES only if it uses the target's points in class distances
and in passes (which go over all pairs of points, block by block) and nowhere else: `flows.run` may
leave the target of such a mode on the CPU or in its file, and moves that of any other mode to the
device.

`Flow.settings` is stored in checkpoints and compared when a flow is resumed. It must contain each
option that changes a step or what is stored of it, because a resumed flow must take the same steps,
and no option that a resumed run may change: where the flow stops (`tolerance`, and `steps` under
most schedules) and the checkpoints. Results hold it too, and `flows.result` reads it by its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, Progress, check_fields, functional, seed
from otdd_flash.checks import called, sequence
from otdd_flash.errors import InputError, choose
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.joint_modes import JointMode, augmented_mode
from otdd_flash.flows.modes import AttachedMode, FeaturesMode, Mode
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.flows.result import StepRecord
from otdd_flash.flows.space import FeatureSpace, Space
from otdd_flash.flows.stepping import TO_THE_END, Stepping
from otdd_flash.labels import ClassDistances
from otdd_flash.solver.term import SolverProgress

MODES: dict[str, Callable[[FlowSetting, ClassDistances], Mode]] = {
    "features": FeaturesMode,
    "attached": AttachedMode,
    "joint": JointMode,
    "augmented": augmented_mode,
}

# Modes whose target may stay on the CPU or in its file; see above.
STREAMING_MODES = ("features", "attached")


@dataclass(frozen=True, eq=False)
class Flow:
    """The options of a flow; on the command line flow.KEY.

    Args:
        steps: the number of steps.
        mode: what moves: `features`, `attached`, `joint` or `augmented`; `otdd_flash.flows.modes`
            and `otdd_flash.flows.joint_modes` give the equations.
        stepping: step size, optimiser, schedule, box, noise and minibatches.
        functionals: weighted terms added to the divergence, such as {"name": "norm", "weight":
            0.1}; see `build_functionals`.
        space: the map from points of both sides to the features that transport compares; by default
            the points are the features.
        refresh: steps between two updates of class distances (mode `features`).
        tolerance: stop once a step changes the objective by at most this share of its first
            value, in (0, 1); None takes all steps.
        keep_moments: store the state of each step, so that the result can carry the flow over to
            new points by its entropic map; n (d + 1) + m numbers and class distances per step.
        seed: of every random draw.
        checkpoints: where to store the state, and whether to resume from it; None stores none.

    Raises:
        InputError: an unknown mode, or a number out of its range.
    """

    steps: Count = 20
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
        check_fields(
            self,
            "flow.",
            functionals=sequence(called("a functional", functional)),
            seed=called("seed", seed),
        )
        choose("flow.mode", self.mode, tuple(MODES))
        if self.refresh < 1:
            raise InputError(
                f"flow.refresh must be positive, got {self.refresh}; 1 measures at every step"
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(
                "flow.tolerance must lie in (0, 1), a share of the first objective, got "
                f"{self.tolerance}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The options by command-line keys, with `steps` only if the schedule needs it."""
        settings = {
            "flow.mode": self.mode,
            **{f"flow.{key}": value for key, value in asdict(self.stepping).items()},
            "flow.functionals": [
                f"{part.weight} {part.name}"
                if isinstance(part, WeightedFunctional)
                else {key: _plain(value) for key, value in part.items()}
                for part in self.functionals
            ],
            "flow.refresh": self.refresh,
            "flow.space": self.space.key,
            "flow.plain": self.stepping.plain,
            "flow.keep_moments": self.keep_moments,
            "seed": self.seed,
        }
        if self.stepping.schedule in TO_THE_END:
            settings["flow.steps"] = self.steps
        return settings


@dataclass(frozen=True)
class Callbacks:
    """Functions that a flow calls; None means no call.

    Args:
        progress: called with the record of each step, and of the end.
        solver_progress: called as solver_progress(term, iteration, marginal error).
        class_progress: called as class_progress(pairs of classes compared, their total).
        stop: called before each step; if it returns True, the flow ends.

    Raises:
        InputError: one of them is not callable.
    """

    progress: Callable[[StepRecord], None] | None = None
    solver_progress: SolverProgress | None = None
    class_progress: Progress | None = None
    stop: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def _plain(parameter: Any) -> Any:
    """Return a parameter as JSON holds it; an array becomes its hash."""
    if isinstance(parameter, Tensor | np.ndarray):
        return content_hash({"array": torch.as_tensor(parameter)})
    return str(parameter) if isinstance(parameter, Path) else parameter
