"""Every functional against its formula, its finite differences and its symmetries; bad ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from live_bytes import LargestTensor
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.flows import functionals
from otdd_flash.flows.functionals import (
    ClassRepulsion,
    Entropy,
    Norm,
    WeightedFunctional,
    build_functionals,
    value_and_velocity,
)
from otdd_flash.samples import LabeledSamples

MATRIX = torch.linspace(-1, 2, 10, dtype=torch.float64).reshape(2, 5)
NORMAL = [1.0, -2.0, 0.5, 0.0, 3.0]
CENTRE = [1.0, 0.0, -1.0, 2.0, 0.5]
SIGNS = {"cat": 1, 3: -1}
SPECS = {
    "norm": {"centre": CENTRE},
    "affine_norm": {"matrix": MATRIX, "offset": [1.0, -1.0]},
    "hyperplane_margin": {"normal": NORMAL, "signs": SIGNS, "offset": 0.5, "margin": 1.5},
    "coordinate_collapse": {"coordinates": [0, 3], "value": 0.25},
    "class_repulsion": {"radius": 1.2},
}
SOURCE = """
import torch

def spread(points, labels, masses, power=1.0):
    return masses @ points.abs().pow(power).sum(1).double()

class Energy:
    @staticmethod
    def total(points, labels, masses):
        return points.sum()
"""


def cloud_of(n=33, d=5):
    """n float64 points of three classes with unequal masses, the third of which is 0."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(n, d, generator=draw, dtype=torch.float64)
    weights = torch.rand(n, generator=draw, dtype=torch.float64) + 0.1
    weights[2] = 0
    return LabeledSamples(points, torch.arange(n) % 3, ("cat", "dog", "3"), weights)


def evaluated(terms, cloud, points=None):
    points = cloud.features if points is None else points
    return value_and_velocity(terms, points, cloud.labels, cloud.masses)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_energies.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def dense_value(name, x, labels, a):
    """The formula of a functional, point by point."""
    value = 0.0
    for i in range(len(x)):
        point = x[i]
        match name:
            case "norm":
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
def test_values_velocities_and_masses_are_those_of_the_formulas(name):
    """Velocities are finite differences over masses; no mass, no effect and no velocity."""
    cloud, step = cloud_of(), 1e-5
    terms = build_functionals([{"name": name, "weight": -0.7, **SPECS[name]}], cloud)
    value, velocity = evaluated(terms, cloud)
    expected = -0.7 * dense_value(name, cloud.features, cloud.labels, cloud.masses)
    assert value == pytest.approx({name: expected}, rel=1e-12)
    assert velocity.abs().max() > 0.01
    for i, k in ((0, 0), (5, 3), (10, 4), (31, 1), (32, 2)):
        ends = []
        for sign in (1, -1):
            moved = cloud.features.clone()
            moved[i, k] += sign * step
            ends.append(evaluated(terms, cloud, moved)[0][name])
        difference = (ends[0] - ends[1]) / (2 * step) / float(cloud.masses[i])
        assert float(velocity[i, k]) == pytest.approx(difference, rel=1e-6, abs=1e-8)
    assert torch.equal(velocity[2], torch.zeros(5, dtype=torch.float64))
    elsewhere = cloud.features.clone()
    elsewhere[2] = 0.3
    moved = evaluated(terms, cloud, elsewhere)
    assert moved[0] == pytest.approx(value, rel=1e-13)
    torch.testing.assert_close(moved[1], velocity)


# Parameters that float32 does not hold, near points that it does: V is what lies between them.
FAR, BESIDE = 1000.0, 1e-5
FAR_SPECS = {
    "norm": {"centre": [FAR + BESIDE] * 5},
    "affine_norm": {"matrix": MATRIX + BESIDE / FAR, "offset": [2500.0, 5.0]},
    "hyperplane_margin": {
        "normal": [1.0, -1.0 + BESIDE / FAR, 0.0, 0.0, 0.0],
        "signs": SIGNS,
        "offset": 2 * BESIDE,
        "margin": 1.0,
    },
    "coordinate_collapse": {"coordinates": [0, 3], "value": FAR + BESIDE},
}


def test_parameters_are_not_rounded_to_the_points_type():
    """Velocities of float32 points are those in float64, rounded once."""
    cloud = cloud_of()
    # Steps of 2^-14, exact at 1000 in float32.
    points = FAR + (cloud.features * 16).round() * 2.0**-14
    for name, spec in FAR_SPECS.items():
        terms = build_functionals([{"name": name, "weight": 1.0, **spec}], cloud)
        exact, velocity = evaluated(terms, cloud, points)
        value, single = evaluated(terms, cloud, points.float())
        with naming(name):
            assert single.dtype == torch.float32
            assert value == pytest.approx(exact, rel=1e-12, abs=0)
            torch.testing.assert_close(single.double(), velocity, rtol=4e-7, atol=1e-12)


def test_repulsion_in_tiles_of_any_size_and_place_never_holds_all_pairs(monkeypatch):
    term = (WeightedFunctional("repulsion", 1.0, ClassRepulsion(CLOUD, 0.8)),)
    for n, tile in ((33, 1), (33, 100), (1, 4), (500, 5000)):
        cloud = cloud_of(max(n, 3), 3).take(torch.arange(n))
        whole = evaluated(term, cloud)
        with naming((n, tile)), monkeypatch.context() as patched, LargestTensor() as largest:
            patched.setattr(functionals, "TILE", tile)
            tiled = evaluated(term, cloud)
            assert tiled[0] == pytest.approx(whole[0], rel=1e-13)
            torch.testing.assert_close(tiled[1], whole[1])
            assert largest.numbers <= max(tile, 3 * n)
    # Exact in float32, so that only the centring can keep the digits.
    points = ((cloud.features * 64).round() / 64).float()
    near, far = (evaluated(term, cloud, points + shift) for shift in (0, 4096))
    assert far[0] == pytest.approx(near[0], rel=1e-5)
    torch.testing.assert_close(far[1], near[1], rtol=1e-4, atol=1e-5)


def test_a_functional_may_change_masses_and_nothing_is_left_in_autograd():
    cloud = cloud_of()
    norm = Norm(cloud)
    masses, points = cloud.masses, cloud.features.clone().requires_grad_()

    def relative(points, labels, a):
        total = a.sum()
        a /= a.max()
        return norm(points, labels, a) * total / a.sum()

    mine, theirs = (WeightedFunctional("norm", 0.7, term) for term in (relative, norm))
    with torch.no_grad():
        found, expected = (evaluated((term,), cloud, points) for term in (mine, theirs))
    assert torch.equal(masses, cloud.masses)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1])
    assert not found[1].requires_grad
    assert points.grad is None


@pytest.mark.usefixtures("user_module")
def test_functions_of_the_user_get_their_keywords_and_equal_names_are_numbered():
    cloud = cloud_of()
    cubes = {"path": "user_energies.spread", "weight": 0.5, "power": 3}
    specs = [
        {"name": "norm", "weight": 1.0},
        {"path": "user_energies:spread", "weight": 1.0},
        {"name": "norm", "weight": 2.0, "centre": [1.0] * 5},
        cubes,
        {"path": "user_energies:Energy.total", "weight": 1},
    ]
    names = [term.name for term in build_functionals(specs, cloud)]
    assert names == ["norm", "spread", "norm_2", "spread_2", "total"]
    values, velocity = evaluated(build_functionals([cubes], cloud), cloud)
    x = cloud.features
    assert values == pytest.approx({"spread": float(0.5 * cloud.masses @ x.abs().pow(3).sum(1))})
    expected = 1.5 * x * x.abs()
    expected[2] = 0
    torch.testing.assert_close(velocity, expected)


def test_arrays_come_in_every_form_and_keep_all_their_digits(tmp_path):
    """A list of numbers was once read as float32."""
    matrix = np.linspace(0, 1, 10).reshape(2, 5) / 3
    np.save(tmp_path / "a.npy", matrix)
    np.savez(tmp_path / "one.npz", A=matrix)
    np.savez(tmp_path / "two.npz", offset=np.ones(2), matrix=matrix)
    for given in (
        matrix.tolist(),
        tuple(map(tuple, matrix.tolist())),
        matrix,
        torch.from_numpy(matrix).requires_grad_(),
        str(tmp_path / "a.npy"),
        tmp_path / "one.npz",
        str(tmp_path / "two.npz"),
    ):
        spec = {"name": "affine_norm", "weight": 1.0, "matrix": given, "offset": [0.1, 0.2]}
        (term,) = build_functionals([spec], cloud_of())
        with naming(type(given)):
            assert torch.equal(term.function.matrix, torch.from_numpy(matrix))
            assert not term.function.matrix.requires_grad
            assert term.function.offset.tolist() == [0.1, 0.2]


NORM, ONE = {"name": "norm", "weight": 1}, {"weight": 1}
AFFINE = {"name": "affine_norm", "weight": 1, "matrix": np.ones((2, 5))}
COLLAPSE = {"name": "coordinate_collapse", "weight": 1}
MARGIN = {"name": "hyperplane_margin", "weight": 1, "normal": [1.0] * 5, "signs": {"cat": 1}}
REPULSION = {"name": "class_repulsion", "weight": 1}
CLOUD = cloud_of()
BAD = [
    ({"name": "gravity", **ONE}, "unknown functional 'gravity'; .*norm, affine_norm"),
    (ONE, "either name=NAME or path=MODULE:FUNCTION"),
    ("norm", "either name=NAME or path"),
    ({"name": "norm"}, "functional norm: needs weight=NUMBER"),
    ({**NORM, "weight": None}, "weight of functional norm .* got None"),
    ({**NORM, "center": 0}, "no parameter 'center'; it has: centre"),
    ({"name": "entropy", "weight": -1}, "must not be negative"),
    ({**NORM, "centre": [np.nan] * 5}, "centre holds NaN or infinite"),
    ({**NORM, "centre": ["a"] * 5}, "centre must be numbers or a file"),
    ({**NORM, "centre": "c.csv"}, "a .npy or .npz file, got 'c.csv'"),
    ({**NORM, "centre": "no.npy"}, "cannot read no.npy"),
    ({"name": "affine_norm", **ONE}, "functional affine_norm: needs matrix=..."),
    ({**AFFINE, "matrix": np.ones((2, 4))}, r"matrix must have shape \(any, 5\), got \(2, 4\)"),
    ({**AFFINE, "offset": [1.0]}, r"offset must have shape \(2\), got \(1,\)"),
    ({**MARGIN, "signs": {"cow": 1}}, "unknown class 'cow'; the classes are: cat, dog, 3"),
    ({**MARGIN, "signs": {"cat": 0}}, "sign of class cat must be 1 or -1, got 0"),
    ({**MARGIN, "signs": {}}, "signs must give 1 or -1 by class name"),
    ({**MARGIN, "margin": -1}, "margin must be finite and not negative, got -1"),
    ({**COLLAPSE, "coordinates": [0, 5]}, r"indices in \[0, 5\), got \[0, 5\]"),
    ({**COLLAPSE, "coordinates": [-1]}, "indices in"),
    ({**COLLAPSE, "coordinates": [1.0]}, "indices in"),
    ({**COLLAPSE, "coordinates": [1, 1]}, "distinct"),
    ({**REPULSION, "radius": 0}, "radius must be positive and finite, got 0"),
    ({"path": 3, **ONE}, "path must be package.module:function, got 3"),
    ({"path": "user_energies:gone", **ONE}, "functional gone: .* has no gone"),
    ({"path": "user_energies:spread", **ONE, "by": 2}, "spread: got an unexpected keyword .*'by'"),
]
# What needs classes, or pairs of them, says so.
NO_CLASSES = [
    (MARGIN, {"labels": None}, "needs labelled particles"),
    (REPULSION, {"labels": None}, "needs labelled particles"),
    (REPULSION, {"labels": torch.ones(33).long()}, "no two of 32 starting points differ in class"),
    (REPULSION, {"features": torch.ones(33, 2)}, "coincide; give radius"),
]


@pytest.mark.usefixtures("user_module")
def test_bad_configurations_name_the_functional_and_the_way_out():
    for spec, other, message in (*((spec, {}, message) for spec, message in BAD), *NO_CLASSES):
        with naming(spec), pytest.raises(InputError, match=message):
            build_functionals([spec], replace(CLOUD, **other))


def test_what_is_no_functional_or_no_weight_is_refused():
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
            evaluated((term,), CLOUD)
    with pytest.raises(InputError, match="distinct names"):
        evaluated((WeightedFunctional("norm", 1.0, Norm(CLOUD)),) * 2, CLOUD)
    for weight, function, message in (
        (math.nan, Norm(CLOUD), "must be finite, got nan"),
        ("1", Norm(CLOUD), "must be a number, got '1'"),
        (True, Norm(CLOUD), "must be a number, got True"),
        (-0.1, Entropy(), "must not be negative, got -0.1"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            WeightedFunctional("this", weight, function)
