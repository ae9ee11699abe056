"""Intervals from subsamples: how often they hold the mean distance, and what they are made of."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampling_cases import mixture, numbered
from scipy.stats import t

from otdd_flash.errors import DataNotice, InputError, NotConvergedWarning
from otdd_flash.labels import ClassDistances
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling import comparison, subsample_interval
from otdd_flash.sliced.tails import tail_excess
from otdd_flash.solver.schedules.converged import Converged

FEWEST = 39


@pytest.fixture
def pair():
    generator = np.random.default_rng(0)
    return mixture(60, generator), mixture(48, generator, 1.0)


@pytest.fixture
def asked(monkeypatch):
    """The distances that are asked for, none of which is solved."""
    calls = []

    def answer(source, target, **settings):
        calls.append((source, target, settings))
        difference = float(source.features.mean() - target.features.mean())
        return SimpleNamespace(value=difference, converged=True)

    monkeypatch.setattr(comparison, "dataset_distance", answer)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 50, 8])
def test_a_known_normal_law_is_covered_as_often_as_the_level_says(asked, size):
    """The difference of two means, whose mean is 0, instead of a distance."""
    generator, covered, repetitions = np.random.default_rng(3), 0, 150
    for seed in range(repetitions):
        sides = [
            LabeledSamples(torch.from_numpy(generator.normal(size=(n, 1))), None, ())
            for n in (64, 160)
        ]
        value = float(sides[0].features.mean() - sides[1].features.mean())
        found = subsample_interval(
            *sides, value, count=79, size=size, seed=seed, labels="none", epsilon=0.1
        )
        covered += found.lower <= 0 <= found.upper
    # Within 2.5 deviations of a binomial count, or more: of normal rows too few are seen to tell
    # their tail from a heavier one.
    assert covered / repetitions > 0.95 - 2.5 * np.sqrt(0.95 * 0.05 / repetitions)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["t3", "lognormal"])
def test_a_mean_of_heavy_tailed_numbers_is_covered(monkeypatch, law):
    """The mean squared length of both sides' rows instead of a distance, 100 pairs of 60 rows.

    Reflected quantiles of subsamples hold it in two of three.
    """

    def answer(source, target, **settings):
        value = sum(float(side.features.square().sum(1).mean()) for side in (source, target))
        return SimpleNamespace(value=value, converged=True)

    monkeypatch.setattr(comparison, "dataset_distance", answer)
    generator, covered, repetitions = np.random.default_rng(5), 0, 100
    for seed in range(repetitions):
        if law == "t3":
            # Each coordinate has variance 3.
            rows, truth = generator.standard_t(3, size=(2, 60, 2)), 4 * 3.0
        else:
            rows = np.exp(generator.normal(size=(2, 60, 2))) - np.exp(0.5)
            truth = 4 * (np.e - 1) * np.e
        sides = [LabeledSamples(torch.from_numpy(part), None, ()) for part in rows]
        value = answer(*sides).value
        found = subsample_interval(
            *sides, value, count=FEWEST, seed=seed, labels="none", epsilon=0.1
        )
        covered += found.lower <= truth <= found.upper
    # Two deviations of a binomial count below 95%.
    assert covered >= 91


def test_the_upper_part_is_longer_by_the_tail_of_the_rows(asked):
    """About as long as the lower for rows on a sphere, and 1 + 3 * 1.7 times at the most."""
    generator = np.random.default_rng(0)
    directions = generator.normal(size=(2, 200, 10))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    lengths = generator.pareto(1.0, size=(2, 200, 1))
    excesses = []
    for rows in (directions, directions * (1 + lengths)):
        found = subsample_interval(*rows, 2.0, count=FEWEST, labels="none", epsilon=0.1)
        assert (found.upper - 2) / (2 - found.lower) == pytest.approx(1 + 3 * found.excess)
        reach = t.ppf(0.975, FEWEST - 1) * found.rate * np.std(found.values, ddof=1)
        assert 2 - found.lower == pytest.approx(reach)
        excesses.append(found.excess)
    assert excesses[0] == 0
    assert 1 < excesses[1] <= 1.7


def test_the_tail_of_a_power_law_is_found():
    """The mean of 400 estimates from 10,000 numbers, each one standard error of 10% too high."""
    numbers = np.random.default_rng(0).random((400, 10_000))
    for index in (0.25, 0.5, 2.0):
        found = float(tail_excess(torch.from_numpy(numbers**-index)).mean())
        assert found == pytest.approx(max(1.1 * index - 0.3, 0), abs=0.03 * index), index
    few = torch.zeros(30)
    few[:2] = 1.0
    assert [float(tail_excess(n)) for n in (torch.zeros(30), torch.ones(30))] == [0, 0]
    assert tail_excess(few) == torch.inf


@pytest.mark.slow
def test_the_mean_distance_between_so_many_samples_is_covered():
    """In eight dimensions, where subsamples are far more distant than the whole."""
    generator = np.random.default_rng(4)
    settings = {"epsilon": 0.5, "labels": "none"}

    def draw(shift):
        return LabeledSamples(torch.from_numpy(generator.normal(shift, size=(40, 8))), None, ())

    drawn = [(draw(0.0), draw(0.7)) for _ in range(60)]
    values = np.array([dataset_distance(*sides, **settings).value for sides in drawn])
    intervals = [
        subsample_interval(*sides, value, count=FEWEST, size=20, **settings)
        for sides, value in zip(drawn[:8], values[:8], strict=True)
    ]
    held = sum(found.lower <= values.mean() <= found.upper for found in intervals)
    assert held >= 7
    assert np.mean([np.mean(found.values) for found in intervals]) > values.mean() + values.std()
    # A normal law's interval is four deviations wide.
    width = np.mean([found.upper - found.lower for found in intervals])
    assert 0.9 < width / (4 * values.std()) < 1.5


def test_a_seed_decides_the_draws(pair, asked):
    first, again, other = (
        subsample_interval(*pair, 0.0, count=FEWEST, seed=seed, epsilon=0.1) for seed in (1, 1, 2)
    )
    assert first == again
    assert set(first.values).isdisjoint(other.values)


def test_the_interval_moves_with_the_value_and_progress_counts(pair, asked):
    here, there = (
        subsample_interval(*pair, value, count=FEWEST, epsilon=0.1) for value in (1.0, 3.5)
    )
    assert there.lower - here.lower == pytest.approx(2.5)
    assert there.upper - here.upper == pytest.approx(2.5)
    heard = []
    told = {"progress": lambda *report: heard.append(report)}
    subsample_interval(*pair, 0.0, count=40, **told, epsilon=0.1)
    assert heard == [(done, 40) for done in range(1, 41)]


def test_sizes_are_in_proportion_and_no_more_than_a_quarter_without_need(pair, asked):
    found = subsample_interval(*pair, 0.0, count=FEWEST, epsilon=0.1)
    assert found.size == (15, 12)
    assert found.rate == pytest.approx(np.sqrt(1 / 3))
    assert {(len(x), len(y)) for x, y, _ in asked} == {(15, 12)}
    assert subsample_interval(*pair, 0.0, count=FEWEST, size=45, epsilon=0.1).size == (45, 36)
    # Two of each of eight classes are 16 of 40 rows.
    with pytest.warns(DataNotice, match="16 rows for 8 classes"):
        found = subsample_interval(
            numbered(*[5] * 8), numbered(40, 40), 0.0, count=FEWEST, epsilon=0.1
        )
    assert found.size == (16, 32)


def test_everything_but_the_rows_stays_as_it_was_for_the_whole(pair, asked):
    subsample_interval(
        *pair, 0.0, count=FEWEST, epsilon=0.7, min_class_size=2, lambda_y=2.0, cache_dir="nowhere"
    )
    for _, _, settings in asked:
        assert settings == {"epsilon": 0.7, "lambda_y": 2.0, "class_distances": None}


def test_class_distances_stay_where_they_do_not_depend_on_the_rows(pair, asked):
    table = ClassDistances(*(torch.tensor([[0.0, w], [w, 0.0]]) for w in (1.0, 2.0, 3.0)))
    subsample_interval(*pair, 0.0, count=FEWEST, class_distances=table, epsilon=0.1)
    assert all(torch.equal(s["class_distances"].full, table.full) for _, _, s in asked)
    asked.clear()
    wholes = mixture(90, np.random.default_rng(1)), mixture(70, np.random.default_rng(2), 1.0)
    subsample_interval(
        *pair, 0.0, count=FEWEST, class_statistics=wholes, labels="means", epsilon=0.1
    )
    whole = dataset_distance(*wholes, labels="means").class_distances
    assert len(asked) == FEWEST
    assert all(torch.equal(s["class_distances"].full, whole.full) for _, _, s in asked)


def test_rows_without_weight_are_never_drawn(pair, asked):
    source, target = pair
    ones, far = torch.ones(len(source)), torch.full((5, 2), 1e3)
    padded = LabeledSamples(
        torch.cat((far, source.features)),
        torch.cat((torch.zeros(5, dtype=torch.int64), source.labels)),
        source.class_names,
        torch.cat((torch.zeros(5), ones)),
    )
    weighted = replace(source, weights=ones)
    one, other = (
        subsample_interval(side, target, 0.0, count=FEWEST, size=15, epsilon=0.1)
        for side in (weighted, padded)
    )
    assert one.size == other.size
    assert one.values == other.values


def test_unlabelled_data_and_labels_that_do_not_count(pair, asked):
    source, target = pair
    settings = {"count": FEWEST, "size": 15, "labels": "none", "epsilon": 0.1}
    labelled = subsample_interval(source, target, 0.0, **settings)
    bare = [LabeledSamples(side.features, None, ()) for side in pair]
    assert subsample_interval(*bare, 0.0, **settings) == labelled


def test_a_dataset_and_itself_have_no_interval(pair, asked):
    found = subsample_interval(pair[0], pair[0], 0.0, epsilon=0.1)
    assert (found.lower, found.upper, found.values, found.identical) == (0.0, 0.0, (), True)
    assert not asked


@pytest.mark.slow
def test_solves_that_stop_early_are_told_once(pair):
    solver = Converged(tolerance=1e-4, max_iterations=1)
    with pytest.warns(
        NotConvergedWarning,
        match=r"after 1 iterations in 39 of 39 .* Raise solver\.max_iterations or epsilon$",
    ) as told:
        subsample_interval(*pair, 0.0, count=FEWEST, epsilon=1.0, solver=solver)
    assert len(told) == 1


def test_what_cannot_be_met_is_an_error(pair, asked):
    for settings, message in (
        ({"count": 38}, "level 0.95 needs at least 39 subsamples, got 38"),
        ({"count": 198, "level": 0.99}, "at least 199 subsamples, got 198"),
        ({"level": 1.0}, r"must lie in \(0, 1\), got 1.0"),
        ({"size": 3}, "at least 4 rows, two of each of its 2 classes"),
        ({"size": 60}, "fewer than its 60: size 60 of the source makes 60"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"epsilon_relative": 0.1}, "epsilon=result.epsilon, instead of epsilon_relative"),
        ({"epsilon": None}, "the epsilon of the whole: give the result's, epsilon=result.epsilon$"),
        ({"labels": "sinkhorn"}, r"Sinkhorn\(epsilon=result.labels_epsilon\)"),
    ):
        with pytest.raises(InputError, match=message):
            subsample_interval(*pair, 0.0, **{"epsilon": 0.1} | settings)
    assert not asked
    # Enough rows per class give no notice.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subsample_interval(*pair, 0.0, count=FEWEST, size=15, epsilon=0.1)
