"""Velocities of every mode against finite differences of the divergence."""

from dataclasses import replace

import pytest
import torch
from small_flows import CASES, blobs, bures_table, divergence, mode_of

import otdd_flash as otdd
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.labels import measure_classes
from otdd_flash.samples import LabeledSamples

# Seven weighted points, the last of them without mass.
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.0, 0.0], dtype=torch.float64)
SOURCE, TARGET = replace(blobs(7, 2), weights=WEIGHTS), blobs(9, 2, seed=1, shift=0.5)


def check(value, at, velocity, masses):
    """Compare a slope along random dz: dF = sum_i a_i <v_i, dz_i>; no mass, no velocity."""
    draw, step = torch.Generator().manual_seed(7), 1e-4
    direction = torch.randn(at.shape, generator=draw, dtype=at.dtype)
    gradient = velocity * masses.reshape(-1, *(1,) * (at.ndim - 1))
    slope = (value(at + step * direction) - value(at - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert not bool(velocity[masses == 0].any())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["features, full", *(c for c in CASES if c.startswith("att"))])
def test_features_move_along_the_gradient(case):
    """At constant class distances, or along the whole of it where they are attached."""
    mode, metric = CASES[case].values()
    table = measure_classes(SOURCE, TARGET, metric).full

    def value(x):
        moved = replace(SOURCE, features=x)
        attached = mode == "attached"
        own = measure_classes(moved, TARGET, metric).full if attached else table
        return divergence(moved, TARGET, own)

    evaluation = mode_of(mode, SOURCE, TARGET, metric).evaluate(SOURCE.features)
    check(value, SOURCE.features, evaluation.features, SOURCE.masses)


@pytest.mark.slow
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", ["joint", "augmented"])
def test_variables_move_along_gradients_of_their_own(name, diagonal):
    """Those of classes, and those of particles."""
    metric = otdd.labels.Gaussian(diagonal=diagonal)
    mode = mode_of(name, SOURCE, TARGET, metric)
    own, masses = SOURCE, torch.bincount(SOURCE.labels, weights=SOURCE.masses)
    if name == "augmented":
        # Apart, so that no two of a class are at the kink of their distance.
        draw = torch.Generator().manual_seed(3)
        for part in mode.variables.values():
            part += 0.3 * torch.randn(part.shape, generator=draw, dtype=part.dtype)
        names = tuple(map(str, range(7)))
        own = LabeledSamples(SOURCE.features, torch.arange(7), names, WEIGHTS)
        masses = SOURCE.masses
    here = {"features": SOURCE.features, **mode.variables}
    theirs = Gaussians.of(TARGET, metric)
    evaluation = mode.evaluate(SOURCE.features)
    velocities = {"features": evaluation.features, **evaluation.variables}
    for variable, velocity in velocities.items():

        def value(moved, variable=variable):
            parts = {**here, variable: moved}
            table = bures_table(Gaussians.from_variables(parts), theirs)
            return divergence(replace(own, features=parts["features"]), TARGET, table)

        of = SOURCE.masses if variable == "features" else masses
        check(value, here[variable], velocity, of)
