"""Full covariances of all particles: which pairs are measured, and what is said of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from small_flows import blobs, digits, flow, mode_of, rough_flow
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.flows import gaussians as gaussians_file
from otdd_flash.flows import loop
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.modes import jointly_driven
from otdd_flash.labels import fidelity
from otdd_flash.labels.fidelity import fidelities
from otdd_flash.labels.pairs import all_pairs

Measured = list[int]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """How many pairs of Gaussians every evaluation measured."""
    counts: Measured = []

    def counted(factors: list[Tensor], pairs: Tensor, *rest: object) -> Tensor:
        counts.append(len(pairs))
        return fidelities(factors, pairs, *rest)

    monkeypatch.setattr(gaussians_file, "fidelities", counted)
    return counts


def apart(count: int, shift: float = 0.0) -> otdd.LabeledSamples:
    """Two classes that are far from one another."""
    samples = blobs(count, shift=shift)
    assert samples.labels is not None
    away = torch.tensor([0.0, 30.0], dtype=torch.float64)[samples.labels]
    return otdd.LabeledSamples(
        samples.features + away[:, None], samples.labels, samples.class_names
    )


@pytest.mark.slow
def test_pairs_that_no_mass_moves_between_are_not_measured(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = apart(20), apart(22, shift=0.5)
    some = mode_of("augmented", source, target, otdd.labels.Gaussian()).evaluate(source.features)
    monkeypatch.setattr(jointly_driven, "NO_MASS", 5e-324)
    monkeypatch.setattr(jointly_driven.FullAugmentedMode, "_needed", lambda *_: None)
    every = mode_of("augmented", source, target, otdd.labels.Gaussian()).evaluate(source.features)
    # Pairs within both classes, and those with the classes of the target.
    assert measured == [2 * 45 + 40, 190 + 40]
    assert some.divergence.value == pytest.approx(every.divergence.value, rel=1e-14)
    assert some.divergence.bounds == pytest.approx(every.divergence.bounds, rel=1e-13)
    torch.testing.assert_close(some.features, every.features, rtol=0, atol=1e-12)
    for name, velocity in some.variables.items():
        torch.testing.assert_close(velocity, every.variables[name], rtol=0, atol=1e-12)


def test_lower_bounds_are_below_the_distances() -> None:
    for classes in (3, 6):
        source, metric = blobs(60, 4, classes=classes), otdd.labels.Gaussian()
        own, target = Gaussians.of(source, metric), Gaussians.of(blobs(9, 4), metric)
        table = own.table(target, torch.zeros(2, 2))
        bounds = own.lower_bounds()
        assert bool((bounds <= table[:classes, :classes] + 1e-12).all())
        assert float(bounds.max()) > 0


@pytest.mark.slow
def test_distances_and_their_gradient_tell_of_their_progress() -> None:
    told: list[tuple[int, int]] = []
    flow(
        blobs(9),
        blobs(11, seed=1),
        mode="augmented",
        steps=1,
        class_progress=lambda done, total: told.append((done, total)),
    )
    # At both ends of the step 36 pairs of particles and 18 with the target, and of their gradients
    # those that show, which rounding may decide about.
    assert told[-4::2] == [(54, 54)] * 2
    for done, total in told[-3::2]:
        assert 18 < done == total <= 54


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_polar_factors_are_computed_for_what_shows_in_a_gradient(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    factors = [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(9)]
    factors[4] *= 1e6
    pairs = all_pairs(9)
    weights = torch.randn(len(pairs), generator=draw, dtype=torch.float64)
    # As in a plan: those far from the diagonal are 0 but for rounding.
    gaps = (pairs[:, 0] - pairs[:, 1]).double()
    weights *= 10.0 ** (-15 * (gaps - 1)) * scale

    def gradient() -> list[Tensor]:
        moving = [factor.clone().requires_grad_() for factor in factors]
        return list(torch.autograd.grad(fidelities(moving, pairs), moving, weights))

    decomposed: list[int] = []
    polar = fidelity.polar_factors
    monkeypatch.setattr(fidelity, "polar_factors", lambda m: decomposed.append(len(m)) or polar(m))
    found = gradient()
    shown = sum(decomposed)
    monkeypatch.setattr(fidelity._InGradients, "apply", lambda values, *_: values)
    expected = gradient()
    # The 8 neighbours, and what a factor of norm 1e6 brings to light.
    assert 8 < shown < len(pairs) / 2
    assert sum(decomposed) - shown == len(pairs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stepping", [otdd.Stepping(0.1), otdd.Stepping(0.1, minibatch=4)])
def test_the_expected_time_is_said_before_the_first_step(
    stepping: otdd.Stepping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LONG", 0.0)
    said: list[int] = []

    def told(record: StepRecord) -> None:
        said.append(len(caplog.records))

    options = {"mode": "augmented", "stepping": stepping, "steps": 3, "progress": told}
    rough_flow(blobs(9), blobs(11, seed=1), **options)
    assert said[0] == 1
    assert "steps to come, 3, will take about 0:0" in caplog.records[0].getMessage()
    assert "labels.diagonal=true" in caplog.records[0].getMessage()
    caplog.clear()
    rough_flow(blobs(9), blobs(11, seed=1), labels=otdd.labels.Gaussian(diagonal=True), **options)
    assert not caplog.records


def seconds(run: Callable[[], object]) -> float:
    """Of the processor, of the fastest of three runs."""
    fastest = math.inf
    for _ in range(3):
        started = time.process_time()
        run()
        fastest = min(fastest, time.process_time() - started)
    return fastest


@pytest.mark.slow
def test_the_expected_time_is_about_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of this process, whatever else the machine does.
    monkeypatch.setattr(jointly_driven, "time", SimpleNamespace(perf_counter=time.process_time))
    source, target = digits("train", 120), digits("test", 120, rotate=30)
    mode = mode_of("augmented", source, target, otdd.labels.Gaussian())
    expected = mode.expected_seconds(source.features)
    mode.evaluate(source.features)
    took = seconds(lambda: mode.evaluate(source.features))
    assert expected / 4 < took < 4 * expected


@pytest.mark.slow
def test_without_full_covariances_augmented_takes_at_most_twice_the_time_of_joint() -> None:
    metric = otdd.labels.Gaussian(diagonal=True)
    source, target = digits("train", 200), digits("test", 200, rotate=30)
    options = {"steps": 3, "labels": metric, "epsilon": 0.1, "solver": otdd.Converged()}
    options["stepping"] = otdd.Stepping(0.1, box=(0.0, 1.0))
    times = [
        seconds(lambda mode=mode: flow(source, target, mode=mode, **options))
        for mode in ("joint", "augmented")
    ]
    assert times[1] < 2 * times[0]
