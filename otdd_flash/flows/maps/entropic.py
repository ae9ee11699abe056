"""New points follow the flow's own velocity field, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from otdd_flash.errors import InputError
from otdd_flash.flows.maps.base import check_dimension
from otdd_flash.flows.maps.field import VelocityField
from otdd_flash.flows.maps.neighbours import in_classes_of
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class EntropicMap:
    """z <- z - tau_k v_k(z) for each step k: the barycentric map of a flow, at any point.

    Each point moves as if it alone had been added to the flow. With mass 0 the map takes the flow's
    own particles to where they ended, to the accuracy of its solves. All that holds for plain
    gradient steps of S_epsilon alone: momentum, other optimisers, added functionals and gradients
    through W move particles by more than the field knows, and labels must not change.

    Args:
        fields: one per step. Taken one after another, so they may be loaded when asked for.
        step_sizes: tau_k, one per step, as long as `fields`.
        box: (lo, hi), to which every coordinate is clamped after each step, as in the flow.
        mass: what a new point has of all mass, in [0, 1); None is the share of one more particle
            beside n equal ones with mass, 1 / (n + 1). With 0 it is a particle that no particle
            feels, not even itself.

    Raises:
        InputError: no steps, not one size per step, a size that is not finite, an empty box, or a
            mass out of range.
    """

    fields: Sequence[VelocityField]
    step_sizes: Sequence[float]
    box: tuple[float, float] | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        if not len(self.fields):
            raise InputError("an entropic map needs the velocity field of at least one step, got 0")
        if len(self.step_sizes) != len(self.fields):
            raise InputError(
                f"an entropic map needs one step size per field, got {len(self.step_sizes)} sizes "
                f"for {len(self.fields)} fields"
            )
        for size in self.step_sizes:
            if not abs(size) < float("inf"):
                raise InputError(f"step sizes must be finite, got {size}")
        if self.box is not None and not self.box[0] < self.box[1]:
            raise InputError(f"box must be (lo, hi) with lo < hi, got {self.box}")
        if self.mass is not None and not 0 <= self.mass < 1:
            raise InputError(f"mass of a new point must lie in [0, 1), got {self.mass}")

    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """The samples after all steps.

        Unlabelled samples move as the class of their nearest particle before the first step, and
        come back unlabelled.

        Raises:
            InputError: another dimension, an unknown class, or too little memory.
        """
        moving = samples
        for step, (field, size) in enumerate(zip(self.fields, self.step_sizes, strict=True)):
            if step == 0:
                check_dimension(samples, field.particles.dim)
                moving = in_classes_of(samples, field.particles)
            mass = _one_more(field.particles) if self.mass is None else self.mass
            features = moving.features - size * field.velocity(moving, mass=mass)
            if self.box is not None:
                features.clamp_(*self.box)
            moving = replace(moving, features=features)
        return replace(samples, features=moving.features)


def _one_more(particles: LabeledSamples) -> float:
    return 1 / (int((particles.masses > 0).sum()) + 1)
