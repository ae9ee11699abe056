"""The velocity field of a flow's step at any point, and the map that follows it step by step.

A flow moves its particles x (n, d) by the first variation of S_epsilon(x, y) in their masses. This
variation is a function F - H on the whole space, where two softmins extend the potentials of the
cross term and of the self term (Feydy et al. 2019, Interpolating between optimal transport and MMD
using Sinkhorn divergences):

    F(z) = -epsilon log sum_j b_j exp((g_j - C(z, y_j)) / epsilon)        of the cross term
    H(z) = -epsilon log sum_i a_i exp((f_i - C(z, x_i)) / epsilon)        of the self term

    v(z) = grad F(z) - grad H(z) = 2 lambda_x (sum_i q_i(z) x_i - sum_j p_j(z) y_j)

with p (m,) and q (n,) the conditional plans at z, whose sums are 1, so that z itself cancels.
z - grad F / (2 lambda_x) is the entropic map of Pooladian & Niles-Weed 2021, Entropic estimation of
optimal transport maps. A step moves z to z - tau v(z).

At a particle, v(x_i) is the flow's own velocity (1 / a_i) dS/dx_i up to rounding, except for one
factor: the row sums r of the self plan are not exact after a solve, and the derivative of its dual
value has (r_i / a_i) (x_i - sum_j q_j x_j) in place of x_i - sum_j q_j x_j. The mean of
|r_i / a_i - 1| under a is the self term's marginal error. Other points get the factor 1: what a
solve leaves over are the modes that the plan averages out, so no extension of r is better.

`FlowResult` (`flows.result`) builds the map from the stored moments. Particles, potentials and
table of a field must be those of one step: with those of another step, v is not the velocity at
which that step moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.flows.maps.nearest import check_dimension, in_classes_of
from otdd_flash.operators.base import refined
from otdd_flash.operators.build import ComputeOptions, CostInputs, build_operator
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.origins import less_origin
from otdd_flash.operators.request import Request
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.centred import conditional_means, origin_near
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.problem import Problem

# Places in a request of (points, particles, target): points against particles, and against the
# target.
OWN, THEIRS = (0, 1), (0, 2)


@dataclass(frozen=True, eq=False)
class VelocityField:
    """The velocity of one step at any point of any class of the particles.

    Attributes:
        particles: n labelled particles before the step.
        target: m labelled points.
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

    @classmethod
    def of(cls, problem: Problem, divergence: Divergence) -> VelocityField:
        """Return the field of a solved step, whose particles are the problem's source.

        Raises:
            InputError: the divergence was solved without debiasing, which a flow needs.
        """
        if divergence.xx is None:
            raise InputError("a velocity field needs the self term of the particles: debias=True")
        request = problem.request
        particles, target = request.seen
        return cls(
            particles,
            target,
            problem.table,
            divergence.xy.g,
            divergence.xx.f,
            problem.epsilon,
            request.cost.squared,
            request.compute,
        )

    def velocity(self, samples: LabeledSamples, *, mass: float = 0.0) -> Tensor:
        """Compute the velocities (k, d) of k labelled points, in the points' type.

        Labels are matched to the particles' by class name; unlabelled points have the class of
        their nearest particle. Weights are ignored.

        Args:
            samples: each of them moves as if the others were not there.
            mass: alpha in [0, 1), the mass of each point if it were part of the flow; 0 gives the
                field itself.

        Raises:
            InputError: another dimension, an unknown class, or too little memory.
        """
        check_dimension(samples, self.particles.dim)
        device = resolve_device(self.compute.device)
        labelled = in_classes_of(samples, self.particles)
        # Equal masses: a conditional plan does not depend on them, but a mass of 0 has no plan.
        points = LabeledSamples(
            labelled.features, labelled.labels, labelled.class_names, name=samples.name
        ).to(device)
        sides = points, self.particles.to(device), self.target.to(device)
        pairs = OWN, THEIRS
        # `resident`: all points are on the device and none are streamed.
        request = Request.prepare(sides, self.cost, self.compute, pairs=pairs, resident=True)
        points, particles, target = request.seen
        # An origin near both clouds: their difference then loses no digits far from 0.
        clouds = ((cloud.features, cloud.masses) for cloud in (particles, target))
        origin = origin_near(clouds, self.compute.dtype)
        first = self.particles.class_total
        own, theirs = self.table[:first, :first], self.table[:first, first:]
        softmin, stay = self._conditional(request.inputs(OWN, own), self.f, origin)
        if mass > 0:
            share = _own_share(softmin, self.epsilon, mass).to(stay.dtype).unsqueeze(1)
            stay.lerp_(less_origin(points.features, origin), share)
        _, go = self._conditional(request.inputs(THEIRS, theirs), self.g, origin)
        return stay.sub_(go).mul_(2 * self.cost.lambda_x).to(samples.features)

    def _conditional(
        self, inputs: CostInputs, potential: Tensor, origin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the softmin (k,) of a potential (m,), and its plan's mean minus origin (k, d)."""
        operator = refined(build_operator(inputs))
        potential = potential.to(operator.a.device)
        softmin = operator.softmin_rows(potential, self.epsilon)
        means = conditional_means(operator, softmin, potential, self.epsilon, inputs.points, origin)
        return softmin, means


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


def _one_more(particles: LabeledSamples) -> float:
    return 1 / (int((particles.masses > 0).sum()) + 1)
