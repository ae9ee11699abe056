"""Full covariances of all particles: which pairs are measured, and what is said of the time."""

import pytest
import torch
from small_flows import blobs, mode_of, rough_flow

import otdd_flash as otdd
from otdd_flash.flows import gaussians as gaussians_file
from otdd_flash.flows import loop
from otdd_flash.flows.modes import jointly_driven
from otdd_flash.labels import gaussian as fidelity
from otdd_flash.labels.gaussian import fidelities
from otdd_flash.labels.pairs import all_pairs


def apart(count, shift=0.0):
    """Two classes that are far from one another."""
    samples = blobs(count, shift=shift)
    away = torch.tensor([0.0, 30.0], dtype=torch.float64)[samples.labels]
    return otdd.LabeledSamples(
        samples.features + away[:, None], samples.labels, samples.class_names
    )


@pytest.mark.slow
def test_pairs_that_no_mass_moves_between_are_not_measured(monkeypatch):
    measured = []

    def counted(factors, pairs, *rest):
        measured.append(len(pairs))
        return fidelities(factors, pairs, *rest)

    monkeypatch.setattr(gaussians_file, "fidelities", counted)
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


def test_polar_factors_are_computed_for_what_shows_in_a_gradient(monkeypatch):
    """They are nearly all of the time of an augmented flow."""
    draw, pairs = torch.Generator().manual_seed(0), all_pairs(9)
    factors = [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(9)]
    factors[4] *= 1e6
    # As in a plan: those far from the diagonal are 0 but for rounding.
    weights = torch.randn(len(pairs), generator=draw, dtype=torch.float64)
    weights *= 10.0 ** (-15 * ((pairs[:, 0] - pairs[:, 1]).double() - 1) - 9)

    def gradient():
        moving = [factor.clone().requires_grad_() for factor in factors]
        return list(torch.autograd.grad(fidelities(moving, pairs), moving, weights))

    decomposed = []
    polar = fidelity.polar_factors
    monkeypatch.setattr(fidelity, "polar_factors", lambda m: decomposed.append(len(m)) or polar(m))
    found = gradient()
    # The 8 neighbours, and what a factor of norm 1e6 brings to light.
    assert 8 < sum(decomposed) < len(pairs) / 2
    monkeypatch.setattr(fidelity._InGradients, "apply", lambda values, *_: values)
    for one, other in zip(found, gradient(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.slow
def test_progress_and_the_expected_time_are_said(caplog, monkeypatch):
    monkeypatch.setattr(loop, "LONG", 0.0)
    said, told = [], []
    options = {"mode": "augmented", "stepping": otdd.Stepping(0.1)}
    options |= {"class_progress": lambda *done: told.append(done)}
    options |= {"progress": lambda _: said.append(len(caplog.records))}
    rough_flow(blobs(9), blobs(11, seed=1), **options)
    # At both ends of a step 36 pairs of particles and 18 with the target, and of their gradients
    # those that show, which rounding may decide about.
    assert told[-4::2] == [(54, 54)] * 2
    for done, total in told[-3::2]:
        assert 18 < done == total <= 54
    # Before the first step.
    assert said[0] == 1
    assert "steps to come, 2, will take about 0:0" in caplog.records[0].getMessage()
    assert "labels.diagonal=true" in caplog.records[0].getMessage()
    caplog.clear()
    rough_flow(blobs(9), blobs(11, seed=1), labels=otdd.labels.Gaussian(diagonal=True), **options)
    assert not caplog.records
