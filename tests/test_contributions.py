"""Contributions of single rows: derivatives by masses, and what really happens without a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import otdd_flash as otdd

DOUBLE = otdd.ComputeOptions("cpu", precision="double", memory_budget=10**9)


def some(seed: int, *, n: int = 14, weights: bool = False) -> otdd.LabeledSamples:
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    features = generator.normal(size=(n, 3)) + labels[:, None] + 0.3 * seed
    masses = generator.random(n) + 0.5 if weights else None
    return otdd.LabeledSamples.from_arrays(features, labels, masses)


def with_masses(samples: otdd.LabeledSamples, masses: torch.Tensor) -> otdd.LabeledSamples:
    return otdd.LabeledSamples(samples.features, samples.labels, samples.class_names, masses)


def distance(source, target, labels, **options):
    options = {"epsilon": 3.0, "solver": otdd.Converged(tolerance=1e-9), **options}
    return otdd.dataset_distance(source, target, labels=labels, compute=DOUBLE, **options)


SOURCE, TARGET = some(0), some(1, n=12)
UNEVEN = some(0, weights=True)


@pytest.mark.parametrize(
    ("source", "labels", "options"),
    [
        (UNEVEN, "gaussian", {}),
        (UNEVEN, "gaussian", {"unbalanced": 2.0}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (UNEVEN, otdd.labels.Gaussian(unbiased=False, diagonal=True), {}),
                (SOURCE, "means", {"debias": False}),
                (SOURCE, "gaussian", {"ground": "cosine", "epsilon": 0.2}),
                (SOURCE, "none", {"ground": "inner", "debias": False}),
                (UNEVEN, "none", {"unbalanced": [0.5, None], "debias": False}),
                (UNEVEN, "means", {"unbalanced": [None, 20.0], "debias": False}),
            )
        ),
    ],
    ids=str,
)
def test_they_are_the_derivative_of_leaving_mass_out(source, labels, options) -> None:
    whole = distance(source, TARGET, labels, **options)
    found = whole.contributions()
    assert found.through_classes == (labels != "none")
    row, step, ends = 7, 1e-4, []
    for sign in (1, -1):
        # A share of the row's mass is left out, and the other masses grow.
        masses = source.masses.clone()
        masses[row] *= 1 - sign * step
        changed = with_masses(source, masses / masses.sum())
        ends.append(distance(changed, TARGET, labels, **options).value)
    a = float(source.masses[row])
    # Of masses (a - t a_i e_i) / (1 - t a_i) the derivative by t at 0 is -a_i (1 - a_i) s_i.
    expected = -(ends[0] - ends[1]) / (2 * step) / (a * (1 - a))
    assert float(found.values[row]) == pytest.approx(expected, rel=2e-4, abs=2e-5)


def test_rows_without_mass_have_none_and_the_others_theirs() -> None:
    masses = UNEVEN.masses.clone()
    masses[[2, 5]] = 0
    with_zeros = with_masses(UNEVEN, masses)
    kept = (masses > 0).nonzero().squeeze(1)
    one = distance(with_zeros, TARGET, "gaussian").contributions().values
    other = distance(with_zeros.take(kept), TARGET, "gaussian").contributions().values
    assert one.isnan().nonzero().squeeze(1).tolist() == [2, 5]
    torch.testing.assert_close(one[kept], other, rtol=1e-6, atol=1e-7)


def test_a_loaded_result_has_the_same(tmp_path) -> None:
    result = distance(SOURCE, TARGET, "means")
    result.save(tmp_path)
    loaded = otdd.DistanceResult.load(tmp_path)
    torch.testing.assert_close(loaded.contributions().values, result.contributions().values)


@pytest.mark.slow
def test_they_tell_what_25_rows_of_the_digits_change() -> None:
    pixels = otdd.extractors.pixels()
    source = otdd.embed(otdd.load("digits", max_samples=300), pixels)
    target = otdd.embed(otdd.load("digits", split="test", rotate=30, max_samples=200), pixels)
    solver = otdd.Converged(tolerance=1e-6)
    settings = {"epsilon": 3.0, "solver": solver, "compute": DOUBLE}
    whole = otdd.dataset_distance(source, target, **settings)
    values = whole.contributions().values
    changes, first_order = [], []
    for row in np.random.default_rng(0).permutation(len(source))[:25]:
        kept = torch.tensor([k for k in range(len(source)) if k != row])
        without = otdd.dataset_distance(source.take(kept), target, **settings)
        changes.append(without.value - whole.value)
        first_order.append(-float(values[row]) / len(source))
    changes, first_order = np.array(changes), np.array(first_order)
    assert spearmanr(changes, first_order).statistic >= 0.99
    assert np.median(np.abs(first_order - changes) / np.abs(changes)) <= 0.05
