"""The schedule of geomloss gives geomloss's own number, and says how far it is from converged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from experiments.peers import Problem, geomloss_divergence
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver import geomloss
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.geomloss import GeomlossSchedule
from otdd_flash.solver.schedules import Converged

RELATIVE = {"fast": 1e-5, "double": 1e-12}

# geomloss 0.3.1: SamplesLoss("sinkhorn", p=2, blur=epsilon ** 0.5, scaling=scaling, debias=True,
# backend="tensorized")(a, x, b, y) in float64 on `waves`, by (epsilon, scaling).
PINNED = {(0.1, 0.5): 1.032001260189904, (0.01, 0.5): 1.0382370427974024}


def waves(n: int, shift: float) -> LabeledSamples:
    """n weighted points in three dimensions, the same with every version of everything."""
    rows = torch.arange(n, dtype=torch.float64)
    points = torch.stack([(rows * frequency).sin() + shift for frequency in (1.1, 2.3, 3.7)], 1)
    return LabeledSamples(points, None, (), 1.5 + rows.cos())


SOURCE, TARGET = waves(31, 0.0), waves(26, 0.8)


def by_schedule(
    source: LabeledSamples,
    target: LabeledSamples,
    epsilon: float,
    scaling: float = 0.5,
    diameter: float | None = None,
    precision: str = "double",
    **more: Any,
) -> Divergence:
    return otdd.sinkhorn_divergence(
        source,
        target,
        epsilon=epsilon,
        options=GeomlossSchedule(scaling, diameter, tolerance=2.0 - 1e-9),
        compute=otdd.ComputeOptions("cpu", precision=precision),
        **more,
    )


@pytest.mark.slow
def test_kernels_give_the_same_number() -> None:
    # On a GPU, else in the interpreter.
    compute = otdd.ComputeOptions("auto", "triton", "fast", memory_budget=0)
    options = GeomlossSchedule(tolerance=2.0 - 1e-9)
    found = otdd.sinkhorn_divergence(SOURCE, TARGET, epsilon=0.1, options=options, compute=compute)
    assert found.value == pytest.approx(PINNED[0.1, 0.5], rel=RELATIVE["fast"])


@pytest.mark.parametrize("precision", list(RELATIVE))
@pytest.mark.parametrize(("epsilon", "scaling"), list(PINNED))
def test_the_value_is_the_number_that_geomloss_gave(
    epsilon: float, scaling: float, precision: str
) -> None:
    found = by_schedule(SOURCE, TARGET, epsilon, scaling, precision=precision)
    assert found.value == pytest.approx(PINNED[epsilon, scaling], rel=RELATIVE[precision])


@pytest.mark.parametrize("precision", list(RELATIVE))
def test_labels_and_weights_of_the_cost_take_part(precision: str) -> None:
    pytest.importorskip("geomloss")
    draw = torch.Generator().manual_seed(0)
    sides = [
        LabeledSamples(side.features, torch.arange(len(side)) % 3, ("a", "b", "c"), side.weights)
        for side in (SOURCE, TARGET)
    ]
    table = torch.rand(6, 6, generator=draw).double() * 4
    problem = Problem(*sides, (table + table.T).fill_diagonal_(0), otdd.GroundCost(0.7, 0.3))
    found = by_schedule(
        *sides,
        0.05,
        diameter=math.sqrt(float(problem.matrix().max())),
        precision=precision,
        class_table=problem.class_table,
        cost=problem.cost,
    )
    theirs = geomloss_divergence(problem, 0.05, scaling=0.5)
    assert found.value == pytest.approx(theirs, rel=RELATIVE[precision])


def test_bounds_and_marginal_error_are_those_of_the_converged_distance() -> None:
    truth = otdd.sinkhorn_divergence(
        SOURCE,
        TARGET,
        epsilon=0.1,
        options=Converged(1e-9),
        compute=otdd.ComputeOptions("cpu", precision="double"),
    ).value
    options = GeomlossSchedule(scaling=0.9)
    with pytest.warns(NotConvergedWarning, match=r"by the schedule of geomloss.*solver=converged"):
        found = otdd.sinkhorn_divergence(SOURCE, TARGET, epsilon=0.1, options=options)
    assert (found.converged, found.stopped_by, found.schedule) == (False, "schedule", "geomloss")
    assert found.to_dict()["schedule"] == "geomloss"
    assert found.bounds[0] <= truth <= found.bounds[1]
    assert not found.bounds[0] <= found.value <= found.bounds[1]


@pytest.mark.parametrize("name", ["certify", "certify_self"])
def test_every_pass_of_the_certificate_is_counted(name: str, monkeypatch: Any) -> None:
    made = getattr(geomloss, name)
    expected = by_schedule(SOURCE, TARGET, 0.1)
    monkeypatch.setattr(geomloss, name, lambda *given: made(*given)._replace(passes=3))
    found = by_schedule(SOURCE, TARGET, 0.1)
    more = {key: found.terms[key].passes - term.passes for key, term in expected.terms.items()}
    assert more == {key: 2 * ((key == "xy") == (name == "certify")) for key in more}


def test_a_diameter_is_positive_and_finite_or_there_is_none() -> None:
    message = r"solver\.diameter must be positive and finite, got inf"
    with pytest.raises(InputError, match=message):
        GeomlossSchedule(diameter=math.inf)
    points = LabeledSamples(torch.ones(4, 2), None, ())
    with pytest.raises(InputError, match=r"solver\.diameter"):
        by_schedule(points, LabeledSamples(torch.ones(5, 2), None, ()), 0.1)
