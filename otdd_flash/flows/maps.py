"""Maps that carry a finished flow over to points that were not in it.

`FlowMap` is their interface. `NearestParticleMap` copies the displacement of the nearest particle,
found by an exact search. `EntropicMap` follows the velocity field of each step.
`flows.residual_map` has a third map, a network, and shares the checks and the matching of classes
by name. `FlowResult` (`flows.result`) makes the maps; `experiments.flow_maps` compares them.

Particles without mass are never nearest, because the objective of the flow did not move them. The
particles, potentials and table of a `VelocityField` must be those of one step: with those of
another step, it is not the velocity at which that step moved. Where the plan of a step falls apart
into groups that exchange almost no mass, particles do not depend on the offsets between these, but
new points between groups do: offsets are balanced, and undetermined ones reported, by
`derivatives.groups`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import less_origin
from otdd_flash.derivatives.centred import conditional_means, origin_near
from otdd_flash.derivatives.groups import (
    Groups,
    new_rows_straddle,
    report_groups,
    settled_columns,
)
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.label_sets import set_name
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples


class FlowMap(Protocol):
    """A map to where a flow would have taken points that were not in it."""

    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the samples, row by row, at new features (k, d), otherwise unchanged.

        Raises:
            InputError: another dimension than that of the particles, or a class that the flow did
                not move.
        """
        ...


def check_dimension(samples: LabeledSamples, dim: int) -> None:
    """Raise an `InputError` unless samples have the dimension of the particles."""
    if samples.dim != dim:
        raise InputError(
            f"{samples.name} has {samples.dim} features, but the particles of the flow had {dim}; "
            "use the extractor that the flow's source came from"
        )


def check_same_particles(before: LabeledSamples, after: LabeledSamples) -> None:
    """Raise an `InputError` unless two clouds have the same shape, as the same particles must."""
    if before.features.shape != after.features.shape:
        raise InputError(
            f"before has shape {tuple(before.features.shape)} and after "
            f"{tuple(after.features.shape)}; row i of both must be the same particle"
        )


def class_indices(
    samples: LabeledSamples, names: tuple[str, ...], *, of_sets: bool = False
) -> Tensor:
    """Return the labels (k,) of labelled samples as indices into `names`, matched by class name.

    Args:
        samples: k labelled samples.
        names: of the classes.
        of_sets: whether they are names of sets of labels, of which a class is one of its own.

    Raises:
        InputError: a class of the samples is not among the names, or two classes share a name.
    """
    assert samples.labels is not None
    own = samples.class_names
    if of_sets and samples.label_sets is None:
        own = tuple(set_name((name,)) for name in own)
    if own == names:
        return samples.labels
    known = {name: index for index, name in enumerate(names)}
    used = [own[index] for index in torch.unique(samples.labels).tolist()]
    unknown = [name for name in used if name not in known]
    if unknown:
        raise InputError(
            f"{samples.name} has classes that the flow did not move: {', '.join(unknown)}; it "
            f"moved {', '.join(names)}. Leave them out with keep_classes, or rename them"
        )
    if len(known) < len(names):
        raise InputError(
            f"classes of the flow share names, so new points cannot be matched: {', '.join(names)}"
        )
    indices = [known.get(name, -1) for name in own]
    return torch.tensor(indices, device=samples.labels.device)[samples.labels]


# The most distances in memory at once.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class NearestParticleMap:
    """z + (x_T - x_0)[i], with i the particle nearest to z at the start, of z's class if labelled.

    It is valid for any flow, also with momentum. Particles without mass are skipped.

    Args:
        before: the n particles before the first step.
        after: the same particles, row by row, after the last.

    Raises:
        InputError: the two have different shapes.
    """

    before: LabeledSamples
    after: LabeledSamples

    def __post_init__(self) -> None:
        check_same_particles(self.before, self.after)

    # `computes` keeps PyTorch's surrounding modes, such as the default device, out.
    @computes
    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the moved samples; labels are matched by class name and ignored if missing.

        Raises:
            InputError: another dimension, or a class without particles that have mass.
        """
        check_dimension(samples, self.before.dim)
        rows = nearest_particles(samples, self.before)
        displacement = self.after.features[rows] - self.before.features[rows]
        return replace(samples, features=samples.features + displacement.to(samples.features))


def nearest_particles(samples: LabeledSamples, particles: LabeledSamples) -> Tensor:
    """Return the row of the nearest particle for k samples, of the same class if both have labels.

    Particles without mass are skipped: nothing in the flow's objective moved them.

    Returns:
        (k,) int64, on the device of the particles.

    Raises:
        InputError: a sample's class is not among the particles, or has no mass there.
    """
    device = particles.features.device
    points, carriers = samples.features.to(device), particles.masses > 0
    if samples.labels is None or particles.labels is None:
        # Place alone decides: all are of one class.
        own, theirs = (
            torch.zeros(len(side), device=device).long() for side in (samples, particles)
        )
    else:
        own = _indices_in(samples, particles).to(device)
        theirs = particles.labels
    rows = torch.empty_like(own)
    for index in torch.unique(own).tolist():
        same = torch.nonzero(carriers & (theirs == index)).squeeze(1)
        if not len(same):
            raise InputError(
                f"no particle of class {particles.class_names[index]!r} has mass, so none tells "
                f"where {samples.name} would go; leave the class out"
            )
        mine = own == index
        rows[mine] = same[_nearest(points[mine], particles.features[same])]
    return rows


def _nearest(points: Tensor, known: Tensor) -> Tensor:
    """Return for each point (k, d) the index of the nearest of the known ones (n, d)."""
    dtype = torch.promote_types(points.dtype, known.dtype)
    known = known.to(dtype)
    blocks = torch.split(points, max(1, BLOCK_ELEMENTS // len(known)))
    # A matrix product would cancel squared norms, and float32 would confuse near neighbours.
    mode = "donot_use_mm_for_euclid_dist"
    found = [torch.cdist(block.to(dtype), known, compute_mode=mode).argmin(1) for block in blocks]
    return torch.cat(found)


def _indices_in(samples: LabeledSamples, particles: LabeledSamples) -> Tensor:
    of_sets = particles.label_sets is not None
    return class_indices(samples, particles.class_names, of_sets=of_sets)


def in_classes_of(samples: LabeledSamples, particles: LabeledSamples) -> LabeledSamples:
    """Return the samples with labels in the numbering of the particles.

    Labels are matched by class name. Unlabelled samples get those of their nearest particles, or
    none if the particles have none.

    Raises:
        InputError: a sample's class is not among the particles.
    """
    if particles.labels is None:
        return replace(samples, labels=None)
    if samples.labels is None:
        labels = particles.labels[nearest_particles(samples, particles)]
    else:
        labels = _indices_in(samples, particles)
    names, sets = particles.class_names, particles.label_sets
    return replace(samples, labels=labels, class_names=names, label_sets=sets)


# Places in a request of (points, particles, target): points against particles, and against the
# target.
OWN, THEIRS = (0, 1), (0, 2)


@dataclass(frozen=True, eq=False)
class VelocityField:
    """The velocity of one step at any point of any class of the particles.

    Attributes:
        particles: n particles before the step.
        target: m points.
        table: class distances W (V_x + V_y, V_x + V_y) between the V_x classes of the particles and
            the V_y of the target, float64.
        g: (m,) column potential of the cross term, in units of the cost.
        f: (n,) potential of the particles' self term, in units of the cost.
        epsilon: regularisation, in units of the cost.
        cost: weights of squared distances.
        compute: where and how passes run.
    """

    particles: LabeledSamples
    target: LabeledSamples
    table: Tensor
    g: Tensor
    f: Tensor
    epsilon: float
    cost: GroundCost
    compute: ComputeOptions

    def velocity(self, samples: LabeledSamples, *, mass: float = 0.0) -> Tensor:
        """Compute the velocities (k, d) of k points, in the points' type.

        Labels are matched to the particles' by class name, and ignored if those have none;
        unlabelled points have the class of their nearest particle. Weights are ignored.

        Args:
            samples: each of them moves as if the others were not there.
            mass: alpha in [0, 1), the mass of each point if it were part of the flow; 0 gives the
                field itself.

        Raises:
            InputError: another dimension, an unknown class, or too little memory.

        Warns:
            NotConvergedWarning: a point lies between groups of the field whose potentials the
                masses do not determine against each other, so that its velocity is not unique.
        """
        velocities, groups = self.velocities_and_groups(samples, mass=mass)
        self.report(groups)
        return velocities

    def report(self, groups: Groups | None) -> None:
        """Warn if velocities are undetermined because of groups of points."""
        report_groups(groups, "velocities of new points", self.particles, required=False)

    def velocities_and_groups(
        self, samples: LabeledSamples, *, mass: float
    ) -> tuple[Tensor, Groups | None]:
        """Return the velocities (k, d), and groups between which they are undetermined, or None.

        Arguments and errors as for `velocity`.
        """
        check_dimension(samples, self.particles.dim)
        device = resolve_device(self.compute.device)
        labelled = in_classes_of(samples, self.particles)
        (f, own_groups), (g, groups) = self._potentials
        # Equal masses: a conditional plan does not depend on them, but a mass of 0 has no plan.
        points = LabeledSamples(
            labelled.features, labelled.labels, labelled.class_names, name=samples.name
        ).to(device)
        sides = points, self.particles.to(device), self.target.to(device)
        pairs = OWN, THEIRS
        # `resident`: all points are on the device and none are streamed.
        whole = Comparison.prepare(sides, self.cost, self.compute, pairs=pairs, resident=True)
        points, particles, target = whole.transformed
        # An origin near both clouds: their difference then loses no digits far from 0.
        clouds = ((cloud.features, cloud.masses) for cloud in (particles, target))
        origin = origin_near(clouds, self.compute.dtype)
        first = self.particles.class_total
        # New points are of the particles' classes.
        own = self.table[:first, :first].repeat(2, 2)
        among = whole.of(*OWN).with_classes(own)
        softmin, stay, of_stay = self._conditional(among, f, own_groups, origin)
        if mass > 0:
            share = _own_share(softmin, self.epsilon, mass).to(stay.dtype).unsqueeze(1)
            stay.lerp_(less_origin(points.features, origin), share)
        towards = whole.of(*THEIRS).with_classes(self.table)
        _, go, of_go = self._conditional(towards, g, groups, origin)
        velocities = stay.sub_(go).mul_(2 * self.cost.lambda_x).to(samples.features)
        return velocities, of_go or of_stay

    @cached_property
    def _potentials(self) -> list[tuple[Tensor, Groups | None]]:
        """f (n,) and g (m,), balanced between groups, each with undetermined groups.

        For a plan that is one group it costs one sample of 64 particles against all m points, and
        one wait for the device, once for all points that are mapped.
        """
        device = resolve_device(self.compute.device)
        sides = self.particles.to(device), self.target.to(device)
        cost, compute = self.cost, self.compute
        found = Comparison.prepare(sides, cost, compute, pairs=((0, 1),), resident=True)
        found = found.with_classes(self.table)
        return [
            settled_columns(found, name, potential, self.epsilon)
            for name, potential in (("xx", self.f), ("xy", self.g))
        ]

    def _conditional(
        self, comparison: Comparison, potential: Tensor, groups: Groups | None, origin: Tensor
    ) -> tuple[Tensor, Tensor, Groups | None]:
        """Return the softmin (k,) of a potential (m,), and its plan's mean minus origin (k, d).

        The last is the groups if points send mass to several of them.
        """
        operator, points = comparison.operator("xy").refined, comparison.points("xy")
        potential = potential.to(operator.a.device)
        softmin = operator.softmin_rows(potential, self.epsilon)
        means = conditional_means(operator, softmin, potential, self.epsilon, points, origin)
        if groups is not None and not new_rows_straddle(
            comparison, softmin, potential, self.epsilon, groups
        ):
            groups = None
        return softmin, means, groups


@dataclass(frozen=True, eq=False)
class EntropicMap:
    """z <- z - tau_k v_k(z) for each step k: the barycentric map of a flow, at any point.

    Each point moves as if it alone had been added to the flow. With mass 0 the map takes the flow's
    own particles to where they ended, to the accuracy of its solves. This holds for plain gradient
    steps of S_epsilon alone: momentum, other optimisers, added functionals, and gradients that
    also go through the class distances W, move particles by more than the field includes. Labels
    must not change.

    Args:
        fields: one per step, used one after another, so they may be loaded lazily.
        step_sizes: tau_k, one per step.
        box: (lo, hi), to which each coordinate is clamped after each step, as in the flow.
        mass: the mass of a new point, in [0, 1); None is the share of one more particle
            besides n equal ones with mass, 1 / (n + 1). With 0, the point acts on no particle,
            not even on itself.

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

    @computes
    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the samples after all steps.

        Unlabelled samples move as the class of their nearest particle before the first step, and
        remain unlabelled.

        Raises:
            InputError: another dimension, an unknown class, or too little memory.

        Warns:
            NotConvergedWarning: velocities of a step, the first one of these, are not unique,
                as `VelocityField.velocity` says.
        """
        moving, reported = samples, False
        for step, (field, size) in enumerate(zip(self.fields, self.step_sizes, strict=True)):
            if step == 0:
                check_dimension(samples, field.particles.dim)
                moving = in_classes_of(samples, field.particles)
            mass = self.mass
            if mass is None:
                mass = 1 / (int((field.particles.masses > 0).sum()) + 1)
            velocities, groups = field.velocities_and_groups(moving, mass=mass)
            if groups is not None and not reported:
                field.report(groups)
                reported = True
            features = moving.features - size * velocities
            if self.box is not None:
                features.clamp_(*self.box)
            moving = replace(moving, features=features)
        return replace(samples, features=moving.features)


def _own_share(softmin: Tensor, epsilon: float, mass: float) -> Tensor:
    """Return omega (k,), the share of a new point of mass alpha in its own plan.

    In a flow that contains z with mass alpha, its self term includes z as well: at small epsilon, z
    is most of its own plan. While alpha is small, the other potentials keep their values, with
    masses scaled by 1 - alpha, and the potential h of z follows from its own row sum, which is 1:

        (1 - alpha) exp((h - H(z)) / epsilon) + alpha exp(2 h / epsilon) = 1,

    quadratic in exp(h / epsilon) because C(z, z) = 0. With omega = alpha exp(2 h / epsilon) = u^2
    it is u^2 + (1 - alpha) alpha^(-1/2) exp(-H / epsilon) u = 1, and sum_i q_i x_i becomes (1 -
    omega) sum_i q_i x_i + omega z. At alpha = 0 this is v(z).
    """
    slope = (1 - mass) / math.sqrt(mass) * (-softmin.double() / epsilon).exp()
    # The positive root without cancellation; an infinite slope correctly gives 0.
    return (2 / (slope + (slope.square() + 4).sqrt())).square()
