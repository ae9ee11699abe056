"""Velocities of every mode against finite differences of the divergence."""

from dataclasses import replace

import pytest
import torch
from small_flows import CASES, blobs, mode_of

# Seven weighted points, the last of them without mass.
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.0, 0.0], dtype=torch.float64)
SOURCE, TARGET = replace(blobs(7, 2), weights=WEIGHTS), blobs(9, 2, seed=1, shift=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.partition(", ")[2] != "means"])
def test_variables_move_along_gradients_over_their_masses(case):
    """At constant class distances, or along the whole of it where they are attached."""
    name, metric = CASES[case].values()
    mode, step = mode_of(name, SOURCE, TARGET, metric), 1e-4
    draw = torch.Generator().manual_seed(3)
    if name == "augmented":
        # Apart, so that no two of a class are at the kink of their distance.
        for part in mode.variables.values():
            part += 0.3 * torch.randn(part.shape, generator=draw, dtype=part.dtype)
    variables = {"features": SOURCE.features.clone(), **mode.variables}
    evaluation = mode.evaluate(variables["features"])
    of_classes = torch.bincount(SOURCE.labels, weights=SOURCE.masses)
    for variable, velocity in {"features": evaluation.features, **evaluation.variables}.items():
        masses = of_classes if name == "joint" and variable != "features" else SOURCE.masses
        moving, start = variables[variable], variables[variable].clone()
        direction = torch.randn(start.shape, generator=draw, dtype=start.dtype)
        ends = []
        for sign in (1, -1):
            moving.copy_(start + sign * step * direction)
            if name == "attached":
                mode.measure(moving)
            ends.append(mode.evaluate(variables["features"]).divergence.value)
        moving.copy_(start)
        gradient = velocity * masses.reshape(-1, *(1,) * (start.ndim - 1))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        assert not bool(velocity[masses == 0].any())
