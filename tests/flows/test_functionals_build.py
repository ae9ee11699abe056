"""Functionals from configurations: numbers, files, import paths, and what may be wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals import build_functionals, value_and_velocity
from otdd_flash.flows.functionals.potentials import AffineNorm, HyperplaneMargin, Norm

SOURCE = """
import torch

def spread(points, labels, masses, power=1.0):
    return masses @ points.abs().pow(power).sum(1).double()

class Energy:
    @staticmethod
    def total(points, labels, masses):
        return points.sum()
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_energies.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("separator", [":", "."])
def test_functions_of_the_user_get_their_keywords(make_cloud, separator):
    cloud = make_cloud()
    spec = {"path": f"user_energies{separator}spread", "weight": 0.5, "power": 3}
    terms = build_functionals([spec], cloud)
    values, velocity = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    x = cloud.features
    assert values == pytest.approx({"spread": float(0.5 * cloud.masses @ x.abs().pow(3).sum(1))})
    expected = 1.5 * x * x.abs()
    expected[2] = 0
    torch.testing.assert_close(velocity, expected)


@pytest.mark.usefixtures("user_module")
def test_terms_of_one_name_are_numbered(make_cloud):
    specs = [
        {"name": "norm", "weight": 1.0},
        {"path": "user_energies:spread", "weight": 1.0},
        {"name": "norm", "weight": 2.0, "centre": [1.0] * 5},
        {"path": "user_energies:spread", "weight": 1.0, "power": 2},
        {"path": "user_energies:Energy.total", "weight": 1},
        {"name": "norm", "weight": 3},
    ]
    names = [term.name for term in build_functionals(specs, make_cloud())]
    assert names == ["norm", "spread", "norm_2", "spread_2", "total", "norm_3"]


@pytest.mark.parametrize("form", ["list", "array", "tensor", "npy", "npz of one", "npz of two"])
def test_arrays_come_in_every_form(make_cloud, tmp_path, form):
    matrix = np.linspace(0, 1, 10).reshape(2, 5)
    np.save(tmp_path / "a.npy", matrix)
    np.savez(tmp_path / "one.npz", A=matrix)
    np.savez(tmp_path / "two.npz", offset=np.ones(2), matrix=matrix)
    given = {
        "list": matrix.tolist(),
        "array": matrix,
        "tensor": torch.from_numpy(matrix).requires_grad_(),
        "npy": str(tmp_path / "a.npy"),
        "npz of one": tmp_path / "one.npz",
        "npz of two": str(tmp_path / "two.npz"),
    }[form]
    spec = {"name": "affine_norm", "weight": 1.0, "matrix": given}
    cloud = make_cloud()
    terms = build_functionals([spec], cloud)
    values, _ = value_and_velocity(terms, cloud.features, cloud.labels, cloud.masses)
    squares = (cloud.features @ torch.from_numpy(matrix).T).square().sum(1)
    assert values["affine_norm"] == pytest.approx(float(cloud.masses @ squares / 2))


MARGIN = {"name": "hyperplane_margin", "weight": 1, "normal": [1.0] * 5, "signs": {"cat": 1}}


BAD = [
    ({"name": "gravity", "weight": 1}, "unknown functional 'gravity'; .*norm, affine_norm"),
    ({"weight": 1}, "either name=NAME or path=MODULE:FUNCTION"),
    ({"name": "norm", "path": "a:b", "weight": 1}, "either name=NAME or path"),
    ("norm", "either name=NAME or path"),
    ({"name": "norm"}, "functional norm: needs weight=NUMBER"),
    ({"name": "norm", "weight": None}, "weight of functional norm .* got None"),
    ({"name": "norm", "weight": 1, "center": 0}, "no parameter 'center'; it has: centre"),
    ({"name": "entropy", "weight": 1, "start": 0}, "no parameter 'start'; it has: none"),
    ({"name": "norm", "weight": 1, "centre": [1.0]}, r"centre must have shape \(5\), got \(1,\)"),
    ({"name": "norm", "weight": 1, "centre": [np.nan] * 5}, "centre holds NaN or infinite"),
    ({"name": "norm", "weight": 1, "centre": ["a"] * 5}, "centre must be numbers or a file"),
    ({"name": "norm", "weight": 1, "centre": "c.csv"}, "a .npy or .npz file, got 'c.csv'"),
    ({"name": "norm", "weight": 1, "centre": "no.npy"}, "cannot read no.npy"),
    ({"name": "affine_norm", "weight": 1}, "functional affine_norm: needs matrix=..."),
    (
        {"name": "affine_norm", "weight": 1, "matrix": np.ones((2, 4))},
        r"matrix must have shape \(any, 5\), got \(2, 4\)",
    ),
    (
        {"name": "affine_norm", "weight": 1, "matrix": np.ones((2, 5)), "offset": [1.0]},
        r"offset must have shape \(2\), got \(1,\)",
    ),
    ({**MARGIN, "signs": {"cow": 1}}, "unknown class 'cow'; the classes are: cat, dog, 3"),
    ({**MARGIN, "signs": {"cat": 0}}, "sign of class cat must be 1 or -1, got 0"),
    ({**MARGIN, "signs": {}}, "signs must give 1 or -1 by class name"),
    ({**MARGIN, "margin": -1}, "margin must be a finite number and at least 0, got -1"),
    ({**MARGIN, "offset": "b"}, "offset must be a finite number, got 'b'"),
    ({**MARGIN, "normal": [1.0]}, r"normal must have shape \(5\)"),
    (
        {"name": "coordinate_collapse", "weight": 1, "coordinates": [0, 5]},
        r"indices in \[0, 5\), got \[0, 5\]",
    ),
    ({"name": "coordinate_collapse", "weight": 1, "coordinates": [-1]}, "indices in"),
    ({"name": "coordinate_collapse", "weight": 1, "coordinates": []}, "indices in"),
    ({"name": "coordinate_collapse", "weight": 1, "coordinates": [1.0]}, "indices in"),
    ({"name": "coordinate_collapse", "weight": 1, "coordinates": [1, 1]}, "distinct"),
    ({"name": "class_repulsion", "weight": 1, "radius": 0}, "radius must be positive, got 0"),
    ({"name": "class_repulsion", "weight": 1, "radius": "s"}, "radius must be a finite number"),
    ({"name": "entropy", "weight": -1}, "must not be negative"),
    ({"path": 3, "weight": 1}, "path must be package.module:function, got 3"),
    ({"path": "user_energies:gone", "weight": 1}, "functional gone: .* has no gone"),
    (
        {"path": "user_energies:spread", "weight": 1, "exponent": 2},
        "functional spread: got an unexpected keyword argument 'exponent'",
    ),
]


@pytest.mark.usefixtures("user_module")
def test_bad_configurations_name_the_functional_and_the_way_out(make_cloud):
    for spec, message in BAD:
        with naming(spec), pytest.raises(InputError, match=message):
            build_functionals([spec], make_cloud())


def test_what_needs_classes_says_so(make_cloud):
    spec, cloud = {"name": "class_repulsion", "weight": 1}, make_cloud(12)
    labels = torch.ones(12, dtype=torch.int64)
    for one, side, message in (
        (MARGIN, replace(cloud, labels=None), "needs labelled particles"),
        (spec, replace(cloud, labels=None), "needs labelled particles"),
        (spec, replace(cloud, labels=labels), "no two of 11 starting points differ in class"),
        (spec, replace(cloud, features=torch.ones(12, 2)), "coincide; give radius"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            build_functionals([one], side)


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, np.array], ids=lambda f: f.__name__)
def test_parameters_keep_all_their_digits(make_cloud, form):
    """A list of numbers was once read as float32."""
    numbers = [1000 / 3, 1e-3, 0.1, 2.0**-40 + 1, 7.0]
    exact = torch.tensor(numbers, dtype=torch.float64)
    given = form(numbers, dtype=torch.float64) if form is torch.tensor else form(numbers)
    row, signs = [given] if isinstance(given, list | tuple) else given[None], {"cat": 1}
    norm, affine, plane = (
        term.function
        for term in build_functionals(
            [
                {"name": "norm", "weight": 1.0, "centre": given},
                {"name": "affine_norm", "weight": 1.0, "matrix": row, "offset": [0.1]},
                {"name": "hyperplane_margin", "weight": 1.0, "normal": given, "signs": signs},
            ],
            make_cloud(),
        )
    )
    assert isinstance(norm, Norm)
    assert isinstance(affine, AffineNorm)
    assert isinstance(plane, HyperplaneMargin)
    for kept in (norm.centre, affine.matrix[0], plane.normal):
        assert torch.equal(kept, exact)
    assert float(affine.offset) == 0.1
