"""How a flow steps: optimiser, schedule, noise and box.

Velocities v are gradients divided by masses, so that plain descent, the default, is the explicit
Euler step x <- x - tau v of the flow, whatever the number of particles.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments.flows import STEPPING
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError, choose

# Learning rate at step k of T, as a multiple of the first.
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda k, total: 1.0,
    "inverse_sqrt": lambda k, total: 1 / math.sqrt(k + 1),
    "linear": lambda k, total: 1 - k / total,
    "cosine": lambda k, total: (1 + math.cos(math.pi * k / total)) / 2,
}
# Of these, the ones that depend on T.
TO_THE_END = ("linear", "cosine")

# Optimisers that want a closure or sparse gradients, or move rows by what other rows do.
UNSUITABLE = ("Optimizer", "LBFGS", "SparseAdam", "Muon", "Adafactor")


@dataclass(frozen=True)
class Stepping:
    """The steps of a flow: optimiser, schedule, noise and box.

    Args:
        step_size: time tau of a step, the optimiser's learning rate; with the default lambda_x and
            plain descent, the share of the way to the target that a point goes.
        optimizer: a class of torch.optim, in any case.
        optimizer_options: its other arguments.
        schedule: of the step size, one of `SCHEDULES`.
        box: (lowest, highest) value of a coordinate, None for no limits.
        noise: deviation of a Gaussian displacement at which the gradient is taken instead of at the
            points (Arbel et al. 2019, Maximum mean discrepancy gradient flow).
        minibatch: particles that move in a step, and points of the target that they see; None for
            all. Others go on by their momentum alone, so that n / minibatch steps are one of all.

    Raises:
        InputError: no such optimiser, option or schedule, or a number out of its range.
    """

    step_size: float = 0.1
    optimizer: str = "SGD"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    box: tuple[float, float] | None = None
    noise: float = 0.0
    minibatch: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, STEPPING, "flow.")
        if not 0 < self.step_size < math.inf:
            raise InputError(
                f"flow.step_size must be positive and finite, got {self.step_size}; 0.1 moves a "
                "point a tenth of its way"
            )
        choose("flow.schedule", self.schedule, tuple(SCHEDULES))
        if self.box is not None:
            if len(self.box) != 2 or not self.box[0] < self.box[1]:
                raise InputError(
                    f"flow.box must be two numbers [lowest, highest], the first below the second, "
                    f"got {list(self.box)}"
                )
            # A list is as good, and is then the same setting.
            object.__setattr__(self, "box", tuple(self.box))
        if not 0 <= self.noise < math.inf:
            raise InputError(f"flow.noise must not be negative, got {self.noise}")
        if self.minibatch is not None and self.minibatch < 1:
            raise InputError(f"flow.minibatch must be positive or null, got {self.minibatch}")
        # Built once for its errors.
        self.build([torch.nn.Parameter(torch.zeros(1))])

    def build(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimiser over some parameters."""
        named = optimizers()
        choose("flow.optimizer", self.optimizer.lower(), tuple(named))
        chosen = named[self.optimizer.lower()]
        try:
            return chosen(parameters, lr=self.step_size, **self.optimizer_options)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"flow.optimizer_options={dict(self.optimizer_options)} do not suit "
                f"{chosen.__name__}: {error}; it takes "
                f"{', '.join(list(inspect.signature(chosen).parameters)[2:])}"
            ) from None

    @property
    def plain(self) -> bool:
        """Whether a step is x <- x - tau v with the current velocity alone."""
        return (
            self.optimizer.lower() == "sgd"
            and not self.optimizer_options
            and self.noise == 0
            and self.minibatch is None
        )

    def step_size_at(self, step: int, total: int) -> float:
        """Return the time tau of step `step` of `total`."""
        return self.step_size * SCHEDULES[self.schedule](step, total)


def optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Optimisers of torch.optim that take one gradient per step, by their names in lower case."""
    return {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and name not in UNSUITABLE
    }


class Draw(IntEnum):
    """What a step's random numbers are for."""

    PERTURBATION = 0
    LANGEVIN = 1
    MINIBATCH = 2


def normal_like(points: Tensor, draw: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape and type of `points`, the same on every device."""
    return torch.randn(points.shape, generator=draw, dtype=points.dtype).to(points.device)


def generator(seed: int, step: int, purpose: int) -> torch.Generator:
    """The source of one step's random numbers, which thus need no state of their own."""
    # A large odd factor sends neighbouring seeds, steps and purposes far from one another.
    mixed = (seed * 1_000_003 + step) * 1_000_003 + purpose
    return torch.Generator().manual_seed(mixed % 2**63)
