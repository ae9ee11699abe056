"""The modes of a flow, by name: what moves besides the points.

`features` and `attached` move points alone, and class distances follow (`feature_driven`); `joint`
and `augmented` also move Gaussians (`jointly_driven`). Run, options, loop and evaluation use the
modes. A new mode is a class and an entry in `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable

from otdd_flash.errors import choose
from otdd_flash.flows.divergence import FlowSetting
from otdd_flash.flows.modes.base import Evaluation, Mode
from otdd_flash.flows.modes.feature_driven import AttachedMode, FeaturesMode
from otdd_flash.flows.modes.jointly_driven import JointMode, augmented_mode
from otdd_flash.labels import ClassDistances

__all__ = ["MODES", "STREAMING_MODES", "Evaluation", "Mode", "build_mode", "check_mode"]

MODES: dict[str, Callable[[FlowSetting, ClassDistances], Mode]] = {
    "features": FeaturesMode,
    "attached": AttachedMode,
    "joint": JointMode,
    "augmented": augmented_mode,
}

# Modes that use the target's points only in passes and in class distances.
STREAMING_MODES = ("features", "attached")


def check_mode(name: str) -> None:
    """Raise an `InputError` that lists the modes unless the name is one of them."""
    choose("flow.mode", name, tuple(MODES))


def build_mode(name: str, setting: FlowSetting, table: ClassDistances) -> Mode:
    """Return the mode of a name, at the start of its flow.

    Raises:
        InputError: an unknown mode, or one that does not work with this metric between classes.
    """
    check_mode(name)
    return MODES[name](setting, table)
