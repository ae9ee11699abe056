"""Velocities of every mode against finite differences of the divergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_flows import CASES, blobs, bures_table, divergence, mode_of
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.labels import measure_classes
from otdd_flash.samples import LabeledSamples


@pytest.fixture
def source() -> LabeledSamples:
    """Seven weighted points, the last of them without mass."""
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.0, 0.0], dtype=torch.float64)
    return replace(blobs(7, 2), weights=weights)


@pytest.fixture
def target() -> LabeledSamples:
    return blobs(9, 2, seed=1, shift=0.5)


def check(value: Callable[[Tensor], float], at: Tensor, velocity: Tensor, masses: Tensor) -> None:
    """Compare slopes along random directions: dF = sum_i a_i <v_i, dz_i>; no mass, no velocity."""
    draw, step = torch.Generator().manual_seed(7), 1e-4
    gradient = velocity * masses.reshape(-1, *(1,) * (at.ndim - 1))
    for _ in range(2):
        direction = torch.randn(at.shape, generator=draw, dtype=at.dtype)
        slope = (value(at + step * direction) - value(at - step * direction)) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert not bool(velocity[masses == 0].any())


def table_at(particles: LabeledSamples, target: LabeledSamples, metric: Any) -> Tensor:
    return measure_classes(particles, target, metric).full


@pytest.mark.slow
def test_features_move_along_the_gradient_at_constant_class_distances(
    source: LabeledSamples, target: LabeledSamples
) -> None:
    metric = otdd.labels.Gaussian()
    table = table_at(source, target, metric)
    evaluation = mode_of("features", source, target, metric).evaluate(source.features)

    def value(x: Tensor) -> float:
        return divergence(replace(source, features=x), target, table)

    check(value, source.features, evaluation.features, source.masses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "diagonal", "means"])
def test_attached_features_move_along_the_whole_gradient(
    kind: str, source: LabeledSamples, target: LabeledSamples
) -> None:
    metric = CASES[f"attached, {kind}"]["labels"]

    def value(x: Tensor) -> float:
        moved = replace(source, features=x)
        return divergence(moved, target, table_at(moved, target, metric))

    evaluation = mode_of("attached", source, target, metric).evaluate(source.features)
    check(value, source.features, evaluation.features, source.masses)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["features", "means", "spreads"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_joint_variables_move_along_their_own_gradients(
    variable: str, diagonal: bool, source: LabeledSamples, target: LabeledSamples
) -> None:
    metric = otdd.labels.Gaussian(diagonal=diagonal)
    mode = mode_of("joint", source, target, metric)
    here = {"features": source.features, **mode.variables}
    theirs = Gaussians.of(target, metric)
    assert source.labels is not None
    classes = torch.bincount(source.labels, weights=source.masses)

    def value(moved: Tensor) -> float:
        parts = {**here, variable: moved}
        table = bures_table(Gaussians.from_variables(parts), theirs)
        return divergence(replace(source, features=parts["features"]), target, table)

    evaluation = mode.evaluate(source.features)
    velocity = {"features": evaluation.features, **evaluation.variables}[variable]
    check(value, here[variable], velocity, source.masses if variable == "features" else classes)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["features", "means", "spreads"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_augmented_particles_move_along_gradients_of_their_own(
    variable: str, diagonal: bool, source: LabeledSamples, target: LabeledSamples
) -> None:
    metric = otdd.labels.Gaussian(diagonal=diagonal)
    mode = mode_of("augmented", source, target, metric)
    # Apart, so that no two of a class are at the kink of their distance.
    draw = torch.Generator().manual_seed(3)
    for part in mode.variables.values():
        part += 0.3 * torch.randn(part.shape, generator=draw, dtype=part.dtype)
    here = {"features": source.features, **mode.variables}
    theirs = Gaussians.of(target, metric)
    names = tuple(map(str, range(len(source))))

    def value(moved: Tensor) -> float:
        parts = {**here, variable: moved}
        own = LabeledSamples(parts["features"], torch.arange(len(source)), names, source.weights)
        return divergence(own, target, bures_table(Gaussians.from_variables(parts), theirs))

    evaluation = mode.evaluate(source.features)
    velocity = {"features": evaluation.features, **evaluation.variables}[variable]
    check(value, here[variable], velocity, source.masses)
