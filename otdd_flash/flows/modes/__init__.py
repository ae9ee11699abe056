"""What moves in a flow: points alone, or Gaussians beside them."""

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

# Those that know the target's points by passes and by class distances alone.
STREAMING_MODES = ("features", "attached")


def check_mode(name: str) -> None:
    """Raise an `InputError` that lists the modes unless this is one."""
    choose("flow.mode", name, tuple(MODES))


def build_mode(name: str, setting: FlowSetting, table: ClassDistances) -> Mode:
    """The mode of a name, at the start of its flow.

    Raises:
        InputError: no such mode, or it does not work with how class distances are measured.
    """
    check_mode(name)
    return MODES[name](setting, table)
