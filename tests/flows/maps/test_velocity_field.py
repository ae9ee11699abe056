"""The velocity of a step: the flow's own at the particles, and what it is elsewhere."""

from dataclasses import replace

import pytest
import reference
import torch
from flow_by_hand import DOUBLE

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import VelocityField
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.problem import Problem

EPSILON = 0.4
COST = otdd.GroundCost(0.6, 0.4)
NAMES = ("a", "b", "c")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cloud(n, seed, *, classes=3, weights=None):
    points = torch.randn(n, 3, generator=generator(seed), dtype=torch.float64)
    return LabeledSamples(points, torch.arange(n) % classes, NAMES[:classes], weights, name="new")


def some_without_mass(n):
    weights = 0.2 + torch.rand(n, generator=generator(5), dtype=torch.float64)
    weights[::4] = 0
    return weights


def random_table(size):
    drawn = 3 * torch.rand(size, size, generator=generator(6), dtype=torch.float64)
    return (drawn + drawn.T).fill_diagonal_(0)


def solved_field(particles, target, table, compute=DOUBLE, tolerance=1e-9):
    problem = Problem.between(particles, target, EPSILON, table, COST, compute)
    return VelocityField.of(problem, problem.solve(otdd.Converged(tolerance)))


@pytest.fixture(scope="module")
def field():
    return solved_field(cloud(23, 0), cloud(17, 1), random_table(6))


def dense_velocity(field, samples, mass):
    """2 lambda_x (stay - go), with the potential of each new point found by bisection."""
    x, y = field.particles, field.target
    costs = [
        reference.dense_cost(
            samples.features,
            side.features,
            field.cost.lambda_x,
            field.cost.lambda_y * block,
            samples.labels,
            side.labels,
        )
        for side, block in (
            (x, field.table[: x.class_total, : x.class_total]),
            (y, field.table[: x.class_total, x.class_total :]),
        )
    ]
    own = x.masses * ((field.f - costs[0]) / field.epsilon).exp()
    low, high = torch.full((2, len(samples)), 50.0, dtype=torch.float64) * torch.tensor([[-1], [1]])
    for _ in range(100):
        h = (low + high) / 2
        alone = mass * (2 * h / field.epsilon).exp()
        total = (1 - mass) * (h / field.epsilon).exp() * own.sum(1) + alone
        low, high = torch.where(total < 1, h, low), torch.where(total < 1, high, h)
    stay = (1 - mass) * (h / field.epsilon).exp()[:, None] * (own @ x.features)
    stay = stay + alone[:, None] * samples.features
    p = y.masses * ((field.g - costs[1]) / field.epsilon).exp()
    return 2 * field.cost.lambda_x * (stay - p @ y.features / p.sum(1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize(("weighted", "labelled"), [(True, True), (False, False)])
def test_at_the_particles_it_is_the_gradient_over_the_masses(weighted, labelled):
    weights = 0.2 + torch.rand(23, generator=generator(5), dtype=torch.float64)
    particles, target = cloud(23, 0, weights=weights if weighted else None), cloud(17, 1)
    table = random_table(6)
    if not labelled:
        particles, target = replace(particles, labels=None), replace(target, labels=None)
        table = None
    x = particles.features.clone().requires_grad_()
    loss = otdd.sinkhorn_loss(
        x,
        target.features,
        particles.masses,
        epsilon=EPSILON,
        labels_x=particles.labels,
        labels_y=target.labels,
        class_table=table if labelled else None,
        lambda_x=COST.lambda_x,
        lambda_y=COST.lambda_y,
        options=otdd.Converged(1e-10),
        compute=DOUBLE,
    )
    (gradient,) = torch.autograd.grad(loss, x)
    expected = gradient / particles.masses.unsqueeze(1)
    found = solved_field(particles, target, table).velocity(particles)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_an_unfinished_solve_leaves_no_more_than_its_marginal_error():
    particles, target, table = cloud(23, 0), cloud(17, 1), random_table(6)
    problem = Problem.between(particles, target, EPSILON, table, COST, DOUBLE)
    gradient = DivergenceGradient(problem, frozenset({"x"}))
    rough = problem.solve(otdd.Converged(0.05), solved=gradient)
    field = VelocityField.of(problem, rough)
    assert rough.xx is not None
    flow = gradient.total["x"] / particles.masses.unsqueeze(1)
    radius = 2 * float(particles.features.norm(dim=1).max())
    gap = (field.velocity(particles) - flow).norm(dim=1)
    assert float(particles.masses @ gap) > 1e-4
    assert float(particles.masses @ gap) <= 2 * COST.lambda_x * radius * rough.xx.marginal_error


@pytest.fixture(scope="module")
def uneven():
    """Of particles some of which have no mass, also a whole class, which the target lacks."""
    weights = some_without_mass(23)
    weights[2::3] = 0
    particles = cloud(23, 0, weights=weights)
    return solved_field(particles, cloud(17, 1, classes=2), random_table(5))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mass", [0.5, 0.0, 1e-6])
def test_anywhere_it_is_the_dense_formula(mass, uneven):
    """Also of a class without mass."""
    samples = cloud(7, 2)
    found, expected = uneven.velocity(samples, mass=mass), dense_velocity(uneven, samples, mass)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_a_point_far_from_all_particles_is_on_its_own(field):
    far = replace(cloud(3, 2), features=cloud(3, 2).features + 1e3)
    nearest = torch.cdist(far.features, field.target.features).argmin(1)
    found = field.velocity(far, mass=0.1)
    expected = 2 * COST.lambda_x * (far.features - field.target.features[nearest])
    assert float((found - expected).norm() / expected.norm()) < 2e-3
    assert bool(torch.isfinite(field.velocity(far)).all())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("backend", "precision", "shift"),
    [
        ("torch", "high", 4096.0),
        ("torch", "double", 4096.0),
        ("triton", "high", 0.0),
        ("triton", "fast", 0.0),
    ],
)
def test_neither_precision_nor_a_distant_origin_costs_accuracy(backend, precision, shift, field):
    """In any precision the field is that of the original points."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    there = replace(
        field,
        compute=otdd.ComputeOptions(device, backend, precision),
        **{
            side: replace(getattr(field, side), features=getattr(field, side).features + shift)
            for side in ("particles", "target")
        },
    )
    samples = cloud(5, 2)
    moved = replace(samples, features=samples.features + shift)
    tolerance = 1e-9 if precision == "double" else 1e-5
    expected = field.velocity(samples, mass=0.04)
    torch.testing.assert_close(
        there.velocity(moved, mass=0.04), expected, rtol=tolerance, atol=tolerance
    )


def test_labels_decide_where_equal_points_go(field):
    point = cloud(1, 2).features.expand(3, -1).contiguous()
    moved = field.velocity(LabeledSamples(point, torch.arange(3), NAMES))
    assert min(float((moved[i] - moved[j]).norm()) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.05
    without = replace(field, cost=otdd.GroundCost(0.6, 0.0))
    alike = without.velocity(LabeledSamples(point, torch.arange(3), NAMES))
    torch.testing.assert_close(alike, alike[:1].expand(3, -1))
    # Classes are matched by name: c, a, unused, b, of which no sample has the third.
    samples = cloud(6, 2)
    renumbered = torch.tensor([1, 3, 0])[samples.labels]
    renamed = LabeledSamples(samples.features, renumbered, ("c", "a", "unused", "b"))
    assert torch.equal(field.velocity(renamed), field.velocity(samples))


@pytest.mark.slow
def test_order_and_particles_without_mass_do_not_matter():
    particles = cloud(23, 0, weights=some_without_mass(23))
    target, table, samples = cloud(17, 1), random_table(6), cloud(6, 2)
    expected = solved_field(particles, target, table).velocity(samples, mass=0.04)
    carriers = torch.nonzero(particles.masses > 0).squeeze(1)
    few = solved_field(
        particles.take(carriers.flip(0)), target.take(torch.arange(17).flip(0)), table
    )
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    found = few.velocity(samples.take(order), mass=0.04)
    torch.testing.assert_close(found, expected[order], rtol=1e-8, atol=1e-9)
    # Nor do the samples' own weights.
    weighted = replace(samples, weights=torch.tensor([0.0, 0, 1, 2, 3, 4]))
    assert torch.equal(few.velocity(weighted), few.velocity(samples))


def test_what_cannot_be_placed_or_has_no_field_is_refused(field):
    two = torch.zeros(2, 3), torch.tensor([0, 1])
    twins = replace(field, particles=replace(field.particles, class_names=("a", "b", "b")))
    problem = Problem.between(cloud(5, 0), cloud(4, 1), EPSILON, random_table(6), COST, DOUBLE)
    for call, message in (
        (
            lambda: field.velocity(LabeledSamples(two[0][:, :2], two[1], NAMES, name="flat")),
            r"flat has 2 features, but the particles .* had 3",
        ),
        (
            lambda: field.velocity(LabeledSamples(*two, ("a", "zebra"), name="zoo")),
            r"zoo has classes .* did not move: zebra; it moved a, b, c",
        ),
        (lambda: twins.velocity(replace(cloud(3, 2), class_names=("b", "a", "b"))), "share names"),
        (
            lambda: VelocityField.of(problem, problem.solve(otdd.Converged(), debias=False)),
            "debias=True",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()
