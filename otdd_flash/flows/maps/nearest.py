"""New points copy the displacement of the nearest particle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from otdd_flash.flows.maps.base import check_dimension, check_same_particles
from otdd_flash.flows.maps.neighbours import nearest_particles
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class NearestParticleMap:
    """z + (x_T - x_0)[i], with i the particle nearest to z at the start, of z's class if labelled.

    Right for any flow, also with momentum. Particles without mass are passed over.

    Args:
        before: the n particles before the first step.
        after: the same particles, row by row, after the last.

    Raises:
        InputError: the two are not of one shape.
    """

    before: LabeledSamples
    after: LabeledSamples

    def __post_init__(self) -> None:
        check_same_particles(self.before, self.after)

    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """The samples moved, their labels matched by class name; without labels, by place alone.

        Raises:
            InputError: another dimension, or a class without particles that have mass.
        """
        check_dimension(samples, self.before.dim)
        rows = nearest_particles(samples, self.before)
        displacement = self.after.features[rows] - self.before.features[rows]
        return replace(samples, features=samples.features + displacement.to(samples.features))
