"""Every functional against its formula, its finite differences and its symmetries."""

import math

import pytest
import torch
from refusals import naming
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals import (
    WeightedFunctional,
    build_functionals,
    noise_temperature,
    value_and_velocity,
)
from otdd_flash.flows.functionals import potentials as class_repulsion
from otdd_flash.flows.functionals.build import Entropy
from otdd_flash.flows.functionals.potentials import ClassRepulsion, Norm
from otdd_flash.samples import LabeledSamples

MATRIX = torch.linspace(-1, 2, 10, dtype=torch.float64).reshape(2, 5)
NORMAL = [1.0, -2.0, 0.5, 0.0, 3.0]
CENTRE = [1.0, 0.0, -1.0, 2.0, 0.5]
SPECS = {
    "norm": {"name": "norm", "weight": 0.7},
    "norm around a centre": {"name": "norm", "weight": 0.7, "centre": CENTRE},
    "affine_norm": {"name": "affine_norm", "weight": 0.3, "matrix": MATRIX, "offset": [1.0, -1.0]},
    "hyperplane_margin": {
        "name": "hyperplane_margin",
        "weight": 2.0,
        "normal": NORMAL,
        "signs": {"cat": 1, 3: -1},
        "offset": 0.5,
        "margin": 1.5,
    },
    "coordinate_collapse": {
        "name": "coordinate_collapse",
        "weight": -0.4,
        "coordinates": [0, 3],
        "value": 0.25,
    },
    "class_repulsion": {"name": "class_repulsion", "weight": 1.5, "radius": 1.2},
    "class_repulsion of automatic radius": {"name": "class_repulsion", "weight": 1.5},
}


def dense_value(name, x, labels, a):
    """The formula of a functional, point by point."""
    value = 0.0
    for i in range(len(x)):
        point = x[i]
        match name:
            case "norm":
                v = point.dot(point) / 2
            case "norm around a centre":
                v = (point - torch.tensor(CENTRE)).square().sum() / 2
            case "affine_norm":
                v = (MATRIX @ point - torch.tensor([1.0, -1.0])).square().sum() / 2
            case "hyperplane_margin":
                side = {0: 1, 1: None, 2: -1}[int(labels[i])]
                distance = point.dot(torch.tensor(NORMAL, dtype=torch.float64)) - 0.5
                v = 0.0 if side is None else max(0.0, 1.5 - side * float(distance))
            case "coordinate_collapse":
                v = ((point[0] - 0.25) ** 2 + (point[3] - 0.25) ** 2) / 2
            case _:
                others = [j for j in range(len(x)) if labels[j] != labels[i]]
                v = sum(a[j] * torch.exp(-(point - x[j]).square().sum() / 2.88) for j in others)
        value += float(a[i]) * float(v)
    return value


@pytest.mark.parametrize("name", SPECS)
def test_values_velocities_and_masses_are_those_of_the_formulas(make_cloud, name):
    """Velocities are finite differences over masses; no mass, no effect and no velocity."""
    cloud, step = make_cloud(), 1e-5
    terms = build_functionals([SPECS[name]], cloud)
    value, velocity = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    if "automatic" not in name:
        expected = SPECS[name]["weight"] * dense_value(
            name, cloud.features, cloud.labels, cloud.masses
        )
        assert value == pytest.approx({SPECS[name]["name"]: expected}, rel=1e-12)
    assert velocity.abs().max() > 0.01
    for i, k in ((0, 0), (5, 3), (10, 4), (31, 1), (32, 2)):
        ends = []
        for sign in (1, -1):
            moved = cloud.features.clone()
            moved[i, k] += sign * step
            values, _ = value_and_velocity(terms, moved, cloud.labels, cloud.masses)
            ends.append(sum(values.values()))
        difference = (ends[0] - ends[1]) / (2 * step) / float(cloud.masses[i])
        assert float(velocity[i, k]) == pytest.approx(difference, rel=1e-6, abs=1e-8)
    assert torch.equal(velocity[2], torch.zeros(5, dtype=torch.float64))
    elsewhere = cloud.features.clone()
    elsewhere[2] = 0.3
    moved = value_and_velocity(terms, elsewhere, cloud.labels, cloud.masses)
    assert moved[0] == pytest.approx(value, rel=1e-13)
    torch.testing.assert_close(moved[1], velocity)


# Parameters that float32 does not hold, near points that it does: V is what lies between them.
FAR = 1000.0
BESIDE = 1e-5
FAR_SPECS = {
    "norm": {"centre": [FAR + BESIDE] * 5},
    "affine_norm": {"matrix": MATRIX + BESIDE / FAR, "offset": [2500.0, 5.0]},
    "hyperplane_margin": {
        "normal": [1.0, -1.0 + BESIDE / FAR, 0.0, 0.0, 0.0],
        "signs": {"cat": 1, 3: -1},
        "offset": 2 * BESIDE,
        "margin": 1.0,
    },
    "coordinate_collapse": {"coordinates": [0, 3], "value": FAR + BESIDE},
}


@pytest.mark.parametrize("name", FAR_SPECS)
def test_parameters_are_not_rounded_to_the_points_type(make_cloud, name):
    """Velocities of float32 points are those in float64, rounded once."""
    cloud = make_cloud()
    # Steps of 2^-14, exact at 1000 in float32.
    points = FAR + (cloud.features * 16).round() * 2.0**-14
    assert torch.equal(points.float().double(), points)
    terms = build_functionals([{"name": name, "weight": 1.0, **FAR_SPECS[name]}], cloud)
    exact, velocity = value_and_velocity(terms, points, cloud.labels, cloud.masses)
    value, single = value_and_velocity(terms, points.float(), cloud.labels, cloud.masses)
    assert single.dtype == torch.float32
    assert value == pytest.approx(exact, rel=1e-12, abs=0)
    torch.testing.assert_close(single.double(), velocity, rtol=4e-7, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(("n", "tile"), [(33, 1), (33, 100), (33, 33 * 32), (1, 4), (500, 5000)])
def test_repulsion_in_tiles_of_any_size_never_holds_all_pairs(make_cloud, monkeypatch, n, tile):
    cloud = make_cloud(max(n, 3), 3).take(torch.arange(n))
    terms = (WeightedFunctional("repulsion", 1.0, ClassRepulsion(0.8)),)
    whole = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    monkeypatch.setattr(class_repulsion, "TILE", tile)
    with LargestTensor() as largest:
        tiled = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    assert tiled[0] == pytest.approx(whole[0], rel=1e-13)
    torch.testing.assert_close(tiled[1], whole[1])
    assert largest.elements <= max(tile, 3 * n)


def test_repulsion_of_two_points_has_a_closed_form():
    points = torch.tensor([[100.0, 0.0], [101.0, 0.0]])
    masses = torch.tensor([0.25, 0.75], dtype=torch.float64)
    term = WeightedFunctional("repulsion", 1.0, ClassRepulsion(2.0))
    values, velocity = value_and_velocity((term,), points, torch.tensor([0, 1]), masses)
    kernel = math.exp(-1 / 8)
    assert values["repulsion"] == pytest.approx(2 * 0.25 * 0.75 * kernel, rel=1e-6)
    # dF / dx_0 = 2 a_0 a_1 k (x_1 - x_0) / s^2: against it, x_0 moves away from x_1.
    expected = torch.tensor([[2 * 0.75 * kernel / 4, 0.0], [-2 * 0.25 * kernel / 4, 0.0]])
    torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=0)


def test_repulsion_does_not_depend_on_the_origin(make_cloud):
    cloud = make_cloud()
    term = (WeightedFunctional("repulsion", 1.0, ClassRepulsion(1.0)),)
    # Exact in float32, so that only the centring can keep the digits.
    points = (cloud.features * 64).round() / 64
    near = value_and_velocity(term, points.float(), cloud.labels, cloud.masses)
    far = value_and_velocity(term, points.float() + 4096, cloud.labels, cloud.masses)
    assert far[0] == pytest.approx(near[0], rel=1e-5)
    torch.testing.assert_close(far[1], near[1], rtol=1e-4, atol=1e-5)


def test_automatic_radius_is_the_median_distance_between_classes_of_a_fixed_sample(
    make_cloud, monkeypatch
):
    points = torch.tensor([[0.0], [1.0], [4.0], [9.0]])
    cloud = LabeledSamples(points, torch.tensor([0, 0, 1, 1]), ("a", "b"))
    (term,) = build_functionals([{"name": "class_repulsion", "weight": 1.0}], cloud)
    # Distances 4, 9, 3 and 8; the lower of the two in the middle.
    assert term.function == ClassRepulsion(4.0)
    cloud = make_cloud(200)
    whole = class_repulsion.median_radius(cloud)
    monkeypatch.setattr(class_repulsion, "SAMPLED", 60)
    state = torch.get_rng_state()
    sampled = class_repulsion.median_radius(cloud)
    assert sampled == class_repulsion.median_radius(cloud) != whole
    assert sampled == pytest.approx(whole, rel=0.1)
    assert torch.equal(torch.get_rng_state(), state)


def test_terms_add_up_and_noise_is_apart(make_cloud):
    cloud = make_cloud()
    specs = [SPECS["norm"], {"name": "entropy", "weight": 0.2}, SPECS["class_repulsion"]]
    terms = build_functionals([*specs, {"name": "entropy", "weight": 0.05}], cloud)
    assert noise_temperature(terms) == pytest.approx(0.25)
    assert noise_temperature(terms[:1]) == 0
    values, velocity = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    assert list(values) == ["norm", "class_repulsion"]
    parts = [evaluate(cloud, SPECS[name])[1] for name in values]
    torch.testing.assert_close(velocity, parts[0] + parts[1])
    with pytest.raises(InputError, match="distinct names"):
        value_and_velocity(terms[:1] * 2, cloud.features, cloud.labels, cloud.masses)
    none, still = value_and_velocity((), cloud.features, cloud.labels, cloud.masses)
    assert none == {}
    assert torch.equal(still, torch.zeros_like(cloud.features))


def test_a_functional_may_change_masses_and_nothing_is_left_in_autograd(make_cloud):
    cloud = make_cloud()
    masses, norm = cloud.masses, Norm()
    points = cloud.features.clone().requires_grad_()

    def relative(points, labels, a):
        total = a.sum()
        a /= a.max()
        return norm(points, labels, a) * total / a.sum()

    mine, theirs = (WeightedFunctional("norm", 0.7, term) for term in (relative, norm))
    with torch.no_grad():
        found, expected = (
            value_and_velocity((term,), points, None, masses) for term in (mine, theirs)
        )
    assert torch.equal(masses, cloud.masses)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1])
    assert not found[1].requires_grad
    assert points.grad is None


def test_what_is_no_functional_or_no_weight_is_refused(make_cloud):
    cloud = make_cloud()
    for function, message in (
        (lambda x, labels, a: x.sum(1), r"return a 0-dim tensor, got \(33,\)"),
        (lambda x, labels, a: 1.0, "return a 0-dim tensor, got float"),
        (lambda x, labels, a: x.sum() / 0, "inf; it must be finite"),
        (lambda x, labels, a: x.detach().sum(), "tensor without gradient"),
        (lambda x, labels, a: torch.ones((), requires_grad=True) * 2, "does not depend on points"),
        (lambda x, labels, a: (x[3] - x[3]).square().sum().sqrt(), "not finite at 1 of 33"),
    ):
        term = WeightedFunctional("mine", 1.0, function)
        with naming(message), pytest.raises(InputError, match=f"functional mine.*{message}"):
            value_and_velocity((term,), cloud.features, None, cloud.masses)
    for name in ("hyperplane_margin", "class_repulsion"):
        terms = build_functionals([SPECS[name]], cloud)
        with pytest.raises(InputError, match=f"{name} needs labelled particles"):
            value_and_velocity(terms, cloud.features, None, cloud.masses)
    for weight, function, message in (
        (math.nan, Norm(), "finite number, got nan"),
        (math.inf, Norm(), "finite number, got inf"),
        ("1", Norm(), "finite number, got '1'"),
        (True, Norm(), "finite number, got True"),
        (-0.1, Entropy(), "must not be negative, got -0.1"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            WeightedFunctional("this", weight, function)


def evaluate(cloud, spec):
    terms = build_functionals([spec], cloud)
    return value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
