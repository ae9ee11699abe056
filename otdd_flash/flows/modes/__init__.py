"""The modes of a flow, by name: what moves besides the points.

`features` and `attached` move points alone, and class distances are computed from the moved points
(`feature_driven`). `joint` and `augmented` also move the Gaussians that stand for the particles'
classes (`jointly_driven`). Both modules give their equations.

`flows.flow` checks a name by `MODES`, and `flows.run` makes the mode and reads `STREAMING_MODES`;
`flows.run` and `flows.objective` name `Mode` in annotations. A new mode is a class, or a function
that makes one, and an entry in `MODES`. A change must keep the names, which
are values of `flow.mode` in users' settings and in saved results. A mode belongs in
`STREAMING_MODES` only if it uses the target's points in class distances and in passes (which go
over all pairs of points, block by block) and nowhere else: `flows.run` may leave the target of such
a mode on the CPU or in its file, and moves that of any other mode to the device.
"""

from __future__ import annotations

from collections.abc import Callable

from otdd_flash.flows.modes.base import Mode
from otdd_flash.flows.modes.feature_driven import AttachedMode, FeaturesMode
from otdd_flash.flows.modes.jointly_driven import JointMode, augmented_mode
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.labels import ClassDistances

__all__ = ["MODES", "STREAMING_MODES", "Mode"]

MODES: dict[str, Callable[[FlowSetting, ClassDistances], Mode]] = {
    "features": FeaturesMode,
    "attached": AttachedMode,
    "joint": JointMode,
    "augmented": augmented_mode,
}

# Modes whose target may stay on the CPU or in its file; see above.
STREAMING_MODES = ("features", "attached")
