"""Contributions of single rows: derivatives by masses, and what really happens without a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import otdd_flash as otdd

DOUBLE = otdd.ComputeOptions("cpu", precision="double", memory_budget=10**9)


def some(
    seed: int, *, n: int = 24, d: int = 3, weights: bool = False, classes: int = 3
) -> otdd.LabeledSamples:
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    features = generator.normal(size=(n, d)) + labels[:, None] + 0.3 * seed
    masses = generator.random(n) + 0.5 if weights else None
    return otdd.LabeledSamples.from_arrays(features, labels, masses)


def distance(
    source, target, labels, *, debias: bool = True, epsilon: float = 0.5, ground="sqeuclidean"
):
    return otdd.dataset_distance(
        source,
        target,
        labels=labels,
        epsilon=epsilon,
        debias=debias,
        ground=ground,
        solver=otdd.Converged(tolerance=1e-9),
        compute=DOUBLE,
    )


METRICS = [
    "gaussian",
    otdd.labels.Gaussian(unbiased=False),
    otdd.labels.Gaussian(diagonal=True),
    otdd.labels.Gaussian(unbiased=False, diagonal=True),
    "means",
    "none",
]


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("labels", METRICS, ids=str)
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_they_are_the_derivative_of_leaving_mass_out(labels, debias, weights) -> None:
    source, target = some(0, weights=weights), some(1, n=20)
    whole = distance(source, target, labels, debias=debias)
    found = whole.contributions()
    assert found.through_classes == (labels != "none")
    step = 1e-4
    for row in (0, 7, 11):
        ends = []
        for sign in (1, -1):
            # A share of the row's mass is left out, and the other masses grow.
            masses = source.masses.clone()
            masses[row] *= 1 - sign * step
            moved = otdd.LabeledSamples(
                source.features, source.labels, source.class_names, masses / masses.sum()
            )
            ends.append(distance(moved, target, labels, debias=debias).value)
        a = float(source.masses[row])
        # Of masses (a - t a_i e_i) / (1 - t a_i) the derivative by t at 0 is -a_i (1 - a_i) s_i.
        expected = -(ends[0] - ends[1]) / (2 * step) / (a * (1 - a))
        assert float(found.values[row]) == pytest.approx(expected, rel=2e-4, abs=2e-5)


@pytest.mark.slow
def test_other_grounds_have_theirs() -> None:
    source, target = some(0), some(1, n=20)
    step = 1e-4
    for ground, labels, debias in (("cosine", "gaussian", True), ("inner", "none", False)):
        whole = distance(source, target, labels, debias=debias, ground=ground)
        value = float(whole.contributions().values[3])
        ends = []
        for sign in (1, -1):
            masses = source.masses.clone()
            masses[3] *= 1 - sign * step
            moved = otdd.LabeledSamples(
                source.features, source.labels, source.class_names, masses / masses.sum()
            )
            ends.append(distance(moved, target, labels, debias=debias, ground=ground).value)
        a = 1 / len(source)
        expected = -(ends[0] - ends[1]) / (2 * step) / (a * (1 - a))
        assert value == pytest.approx(expected, rel=2e-4, abs=2e-5), ground


def test_without_debiasing_and_labels_they_are_the_calibrated_gradient_of_potentials() -> None:
    result = distance(some(0), some(1, n=20), "none", debias=False)
    f = result.potentials[0].double()
    n = len(f)
    expected = torch.stack([f[i] - (f.sum() - f[i]) / (n - 1) for i in range(n)])
    torch.testing.assert_close(result.contributions().values, expected, rtol=1e-6, atol=1e-7)


def test_class_distances_that_do_not_follow_the_masses_are_held() -> None:
    source, target = some(0), some(1, n=20)
    held = distance(source, target, otdd.labels.Sinkhorn(epsilon=1.0)).contributions()
    assert not held.through_classes
    whole = some(0, n=60), some(1, n=60)
    table = otdd.dataset_distance(
        source, target, epsilon=0.5, class_statistics=whole, compute=DOUBLE
    )
    assert table.method == "gaussian"
    assert not table.contributions().through_classes


def test_rows_without_mass_have_none_and_the_others_theirs() -> None:
    source, target = some(0, weights=True), some(1, n=20)
    masses = source.masses.clone()
    masses[[2, 5]] = 0
    with_zeros = otdd.LabeledSamples(source.features, source.labels, source.class_names, masses)
    kept = (masses > 0).nonzero().squeeze(1)
    one = distance(with_zeros, target, "gaussian").contributions().values
    other = distance(with_zeros.take(kept), target, "gaussian").contributions().values
    assert one.isnan().nonzero().squeeze(1).tolist() == [2, 5]
    torch.testing.assert_close(one[kept], other, rtol=1e-6, atol=1e-7)


def test_of_equal_datasets_nothing_is_carried() -> None:
    source = some(0)
    found = distance(source, source, "none").contributions().values
    assert found.abs().max() < 1e-8


def test_a_loaded_result_has_the_same(tmp_path) -> None:
    result = distance(some(0), some(1, n=20), "gaussian")
    result.save(tmp_path)
    loaded = otdd.DistanceResult.load(tmp_path)
    torch.testing.assert_close(loaded.contributions().values, result.contributions().values)


@pytest.mark.slow
def test_they_tell_what_50_rows_of_the_digits_change() -> None:
    pixels = otdd.extractors.pixels()
    source = otdd.embed(otdd.load("digits"), pixels)
    target = otdd.embed(otdd.load("digits", split="test", rotate=30), pixels)
    settings = {
        "epsilon": 3.0,
        "solver": otdd.Converged(tolerance=1e-6),
        "compute": DOUBLE,
    }
    whole = otdd.dataset_distance(source, target, **settings)
    values = whole.contributions().values
    changes, first_order = [], []
    for row in np.random.default_rng(0).permutation(len(source))[:50]:
        kept = torch.tensor([k for k in range(len(source)) if k != row])
        without = otdd.dataset_distance(source.take(kept), target, **settings)
        changes.append(without.value - whole.value)
        first_order.append(-float(values[row]) / len(source))
    changes, first_order = np.array(changes), np.array(first_order)
    assert spearmanr(changes, first_order).statistic >= 0.99
    assert np.median(np.abs(first_order - changes) / np.abs(changes)) <= 0.05
