"""Rows drawn without replacement, intervals from subsamples, and the noise floor."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError, NotConvergedWarning
from otdd_flash.labels import ClassDistances
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling import comparison, subsampling
from otdd_flash.sampling.comparison import least_rows, subsample
from otdd_flash.sampling.subsampling import (
    most_per_half,
    noise_floor,
    subsample_interval,
    two_halves,
)
from otdd_flash.solver.schedules import Converged

FEWEST = 39


def numbered(*sizes):
    """Classes of these sizes, mixed; the only feature is the row's number."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = torch.arange(len(labels), dtype=torch.float32).unsqueeze(1)
    return LabeledSamples(rows, torch.from_numpy(labels), tuple("abcdefgh"[: len(sizes)]))


def numbers(samples):
    """The rows of a `numbered` dataset that `samples` holds."""
    return samples.features.squeeze(1).int().tolist()


def mixture(size, generator, shift=0.0):
    """Two Gaussian classes in two dimensions, the first with probability 0.7."""
    labels = (generator.random(size) > 0.7).astype(np.int64)
    points = generator.normal(size=(size, 2)) + 2 * labels[:, None] + shift
    return LabeledSamples(
        torch.from_numpy(points).float(), torch.from_numpy(labels), ("often", "seldom")
    )


@pytest.fixture
def pair():
    generator = np.random.default_rng(0)
    return mixture(60, generator), mixture(48, generator, 1.0)


# Draws.


@pytest.mark.parametrize("size", [7, 53, 105])
def test_a_subsample_holds_no_row_twice_and_two_of_every_class_and_weights_go_along(size):
    samples = replace(numbered(33, 70, 3), weights=torch.arange(1.0, 107.0))
    assert least_rows(samples) == 6
    for seed in range(10):
        drawn = subsample(samples, size, np.random.default_rng(seed))
        rows = numbers(drawn)
        assert len(set(rows)) == len(rows) == size
        assert drawn.labels.tolist() == samples.labels[rows].tolist()
        assert min(drawn.class_counts) >= 2
        expected = torch.tensor(rows, dtype=torch.float64) + 1
        torch.testing.assert_close(drawn.weights, expected / expected.sum())


@pytest.mark.slow
def test_all_rows_are_drawn_equally_often_and_class_counts_vary_as_in_sampling():
    samples, draws, size = numbered(30, 70), 600, 20
    generator = np.random.default_rng(1)
    drawn = [subsample(samples, size, generator) for _ in range(draws)]
    often = np.bincount([row for one in drawn for row in numbers(one)], minlength=100)
    share = size / 100
    assert np.abs(often - draws * share).max() < 4.5 * np.sqrt(draws * share * (1 - share))
    counts = np.array([one.class_counts[0] for one in drawn])
    # Hypergeometric: 30 of 100 rows are of the class.
    assert counts.var() == pytest.approx(size * 0.3 * 0.7 * (100 - size) / 99, rel=0.15)
    firsts = [two_halves(numbered(10, 21), 15, generator)[0] for _ in range(400)]
    often = np.bincount([row for half in firsts for row in numbers(half)], minlength=31)
    assert np.abs(often - 400 * 15 / 31).max() < 5 * np.sqrt(400) / 2


@pytest.mark.parametrize(("sizes", "size"), [((33, 70, 5), 53), ((33, 70, 5), 7), ((4,), 2)])
def test_halves_share_no_row_and_have_equal_classes(sizes, size):
    samples = numbered(*sizes)
    assert most_per_half(samples) == sum(count // 2 for count in sizes)
    for seed in range(10):
        one, other = two_halves(samples, size, np.random.default_rng(seed))
        assert len(set(numbers(one)) | set(numbers(other))) == 2 * size
        assert one.class_counts.tolist() == other.class_counts.tolist()
        assert min(one.class_counts) >= 2
        for half in (one, other):
            assert half.labels.tolist() == samples.labels[numbers(half)].tolist()
    with pytest.raises(InputError, match="class b has 3; min_class_size=4 drops"):
        most_per_half(numbered(8, 3))


# Intervals.


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


def interval(source, target, value=0.0, **settings):
    return subsample_interval(source, target, value, **{"count": FEWEST, "epsilon": 0.1} | settings)


@pytest.mark.slow
def test_a_known_normal_law_is_covered_as_often_as_the_level_says(asked):
    """The difference of two means, whose mean is 0, instead of a distance."""
    generator, covered, repetitions = np.random.default_rng(3), 0, 150
    for seed in range(repetitions):
        sides = [
            LabeledSamples(torch.from_numpy(generator.normal(size=(n, 1))), None, ())
            for n in (64, 160)
        ]
        value = float(sides[0].features.mean() - sides[1].features.mean())
        found = interval(*sides, value, size=8, seed=seed, labels="none")
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
    generator, covered = np.random.default_rng(5), 0
    for seed in range(100):
        if law == "t3":
            # Each coordinate has variance 3.
            rows, truth = generator.standard_t(3, size=(2, 60, 2)), 4 * 3.0
        else:
            rows = np.exp(generator.normal(size=(2, 60, 2))) - np.exp(0.5)
            truth = 4 * (np.e - 1) * np.e
        sides = [LabeledSamples(torch.from_numpy(part), None, ()) for part in rows]
        found = interval(*sides, answer(*sides).value, seed=seed, labels="none")
        covered += found.lower <= truth <= found.upper
    # Two deviations of a binomial count below 95%.
    assert covered >= 91


@pytest.mark.slow
def test_the_mean_distance_between_so_many_samples_is_covered():
    """In eight dimensions, where subsamples are far more distant than the whole."""
    generator = np.random.default_rng(4)
    settings = {"epsilon": 0.5, "labels": "none"}

    def draw(shift):
        return LabeledSamples(torch.from_numpy(generator.normal(shift, size=(40, 8))), None, ())

    drawn = [(draw(0.0), draw(0.7)) for _ in range(30)]
    values = np.array([dataset_distance(*sides, **settings).value for sides in drawn])
    intervals = [
        interval(*sides, value, size=20, **settings)
        for sides, value in zip(drawn[:2], values[:2], strict=True)
    ]
    assert all(found.lower <= values.mean() <= found.upper for found in intervals)
    assert np.mean([np.mean(found.values) for found in intervals]) > values.mean() + values.std()
    # A normal law's interval is four deviations wide.
    width = np.mean([found.upper - found.lower for found in intervals])
    assert 0.9 < width / (4 * values.std()) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("unbalanced", [1.0, 9.0])
def test_the_mean_relaxed_distance_is_covered(unbalanced):
    """At the penalty of the whole, of rows of which a fifth has no counterpart nearby."""
    generator = np.random.default_rng(7)
    settings = {"epsilon": 0.5, "labels": "none", "unbalanced": unbalanced}

    def draw(shift):
        far = 6 * (generator.random((40, 1)) < 0.1 * shift)
        rows = generator.normal(shift, size=(40, 2)) + far
        return LabeledSamples(torch.from_numpy(rows), None, ())

    drawn = [(draw(0.0), draw(2.0)) for _ in range(100)]
    values = np.array([dataset_distance(*sides, **settings).value for sides in drawn])
    found = [
        interval(*sides, value, seed=seed, **settings)
        for seed, (sides, value) in enumerate(zip(drawn[:20], values[:20], strict=True))
    ]
    covered = sum(each.lower <= values.mean() <= each.upper for each in found)
    # Of 20 at 95%, 17 or more in 98 of 100. Where mass is left, subsamples of ten rows deviate by
    # more than the rate says, as near distance 0.
    assert covered >= 17
    width = np.mean([each.upper - each.lower for each in found])
    assert 0.8 < width / (4 * values.std()) < 3


def test_parts_of_an_interval_have_the_penalty_of_the_whole(compared):
    source, target = numbered(21, 20), numbered(60, 50)
    given = {"labels": "means", "epsilon": 1000.0}
    with pytest.raises(InputError, match=r"unbalanced=rho \* result\.mean_cost, instead of"):
        interval(source, target, **(given | {"unbalanced_relative": 1.0}))
    found = interval(source, target, **(given | {"unbalanced": 50.0}))
    assert found.lower < found.upper
    assert {result.constraints.columns.rho for *_, result in compared} == {50.0}


def test_a_seed_decides_the_draws_and_the_interval_moves_with_the_value(pair, asked):
    heard = []
    first = interval(*pair, 1.0, seed=1, progress=lambda *report: heard.append(report))
    assert heard == [(done, FEWEST) for done in range(1, FEWEST + 1)]
    # Sizes are in proportion, and no more than a quarter.
    assert first.size == (15, 12)
    assert first.rate == pytest.approx(np.sqrt(1 / 3))
    assert {(len(x), len(y)) for x, y, _ in asked} == {(15, 12)}
    again, there = (interval(*pair, value, seed=1) for value in (1.0, 3.5))
    assert first == again
    assert there.lower - first.lower == pytest.approx(2.5)
    assert there.upper - first.upper == pytest.approx(2.5)
    assert set(first.values).isdisjoint(interval(*pair, seed=2).values)
    assert interval(*pair, size=45).size == (45, 36)
    # Two of each of eight classes are 16 of 40 rows.
    with pytest.warns(DataNotice, match="16 rows for 8 classes"):
        found = interval(numbered(*[5] * 8), numbered(40, 40))
    assert found.size == (16, 32)


def test_everything_but_the_rows_stays_as_it_was_for_the_whole(pair, asked):
    interval(*pair, epsilon=0.7, min_class_size=2, lambda_y=2.0, cache_dir="nowhere")
    for _, _, settings in asked:
        assert settings == {"epsilon": 0.7, "lambda_y": 2.0, "class_distances": None}
    table = ClassDistances(*(torch.tensor([[0.0, w], [w, 0.0]]) for w in (1.0, 2.0, 3.0)))
    wholes = mixture(90, np.random.default_rng(1)), mixture(70, np.random.default_rng(2), 1.0)
    of_wholes = dataset_distance(*wholes, labels="means", epsilon=10.0).class_distances
    for given, expected in (
        ({"class_distances": table}, table),
        ({"class_statistics": wholes, "labels": "means"}, of_wholes),
    ):
        asked.clear()
        interval(*pair, **given)
        assert len(asked) == FEWEST
        assert all(torch.equal(s["class_distances"].full, expected.full) for _, _, s in asked)


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
    one, other = (interval(side, target, size=15) for side in (weighted, padded))
    assert one.size == other.size
    assert one.values == other.values


def test_labels_that_do_not_count_do_not_matter_and_a_dataset_and_itself_have_no_interval(
    pair, asked
):
    bare = [LabeledSamples(side.features, None, ()) for side in pair]
    settings = {"size": 15, "labels": "none"}
    assert interval(*bare, **settings) == interval(*pair, **settings)
    asked.clear()
    found = interval(pair[0], pair[0])
    assert (found.lower, found.upper, found.values, found.identical) == (0.0, 0.0, (), True)
    assert not asked


def test_what_cannot_be_met_is_an_error(pair, asked):
    for settings, message in (
        ({"count": 38}, "level 0.95 needs at least 39 subsamples, got 38"),
        ({"count": 198, "level": 0.99}, "at least 199 subsamples, got 198"),
        ({"level": 1.0}, r"must lie in \(0, 1\), got 1.0"),
        ({"size": 3}, "at least 4 rows, two of each of its 2 classes"),
        ({"size": 60}, "fewer than its 60: size 60 of the source makes 60"),
        ({"epsilon_relative": 0.1}, "epsilon=result.epsilon, instead of epsilon_relative"),
        ({"epsilon": None}, "the epsilon of the whole: give the result's, epsilon=result.epsilon$"),
        ({"labels": "sinkhorn"}, r"labels=.*Sinkhorn\(epsilon=result.labels_epsilon\)"),
        (
            {"labels": otdd.labels.Tree({"a": None}, add="sinkhorn")},
            r" add=.*Sinkhorn\(epsilon=result.labels_epsilon\)",
        ),
    ):
        with pytest.raises(InputError, match=message):
            subsample_interval(*pair, 0.0, **{"epsilon": 0.1} | settings)
    assert not asked


# The noise floor.


@pytest.fixture
def compared(monkeypatch):
    """The datasets and settings that are compared, with the results."""
    calls = []

    def keep(source, target, **settings):
        result = dataset_distance(source, target, **settings)
        calls.append((source, target, settings, result))
        return result

    monkeypatch.setattr(comparison, "dataset_distance", keep)
    return calls


def test_halves_have_the_penalty_of_the_whole(compared):
    source, target = numbered(21, 20), numbered(60, 50)
    given = {"labels": "means", "epsilon": 1000.0}
    with pytest.raises(InputError, match=r"unbalanced=rho \* result\.mean_cost, instead of"):
        noise_floor(source, target, **given, unbalanced_relative=1.0)
    noise_floor(source, target, **given, unbalanced=50.0)
    assert [result.constraints.rows.rho for *_, result in compared] == [50.0] * 3


def test_halves_are_disjoint_parts_of_one_dataset_and_all_of_one_size(compared):
    source, target = numbered(21, 20), numbered(60, 50)
    floor = noise_floor(source, target, labels="means", epsilon=1000.0)
    within_source, within_target, between = compared
    assert floor.size == 20
    assert all(len(side) == 20 for call in compared for side in call[:2])
    for one, other, *_ in (within_source, within_target):
        assert set(numbers(one)).isdisjoint(numbers(other))
    assert numbers(between[0]) == numbers(within_source[0])
    assert numbers(between[1]) == numbers(within_target[0])
    for shown, (*_, result) in zip(
        (floor.source, floor.target, floor.between), compared, strict=True
    ):
        assert (shown.value, shown.lower, shown.upper) == (result.value, *result.bounds)


@pytest.mark.slow
def test_different_datasets_are_above_the_floor_and_equal_ones_are_not(pair):
    far = pair[0], LabeledSamples(pair[1].features + 2, pair[1].labels, pair[1].class_names)
    first, again, other = (noise_floor(*far, seed=seed, epsilon=0.3) for seed in (1, 1, 2))
    assert first == again
    assert first.source != other.source
    assert first.between.lower > 5 * max(first.source.upper, first.target.upper)
    generator = np.random.default_rng(1)
    like = noise_floor(mixture(100, generator), mixture(100, generator), epsilon=0.3)
    assert like.between.value < 3 * max(like.source.value, like.target.value)


def test_a_given_table_holds_within_each_dataset(pair, compared):
    blocks = [torch.tensor([[0.0, w], [w, 0.0]]) for w in (1.0, 2.0, 3.0)]
    noise_floor(*pair, class_distances=ClassDistances(*blocks), epsilon=10.0)
    for (_, _, settings, _), block in zip(compared[:2], (blocks[0], blocks[2]), strict=True):
        assert torch.equal(settings["class_distances"].full, block.double().repeat(2, 2))
    assert torch.equal(compared[2][2]["class_distances"].xy, blocks[1].double())


@pytest.mark.slow
def test_why_solves_stopped_early_is_told_once(pair):
    early = Converged(tolerance=1e-4, max_iterations=1)
    rounded = r"rounding allows in 3 of 3 .* Raise solver\.bound_width or eps"
    stopped = r"after 1 iterations in 39 of 39 .* Raise solver\.max_iterations or epsilon$"
    for call, solver, message in (
        (noise_floor, Converged(bound_width=1e-9), rounded),
        (interval, early, stopped),
    ):
        with pytest.warns(NotConvergedWarning, match=message) as told:
            call(*pair, epsilon=1.0, solver=solver)
        assert len(told) == 1, message


def test_what_has_no_halves_is_refused(pair, compared):
    whole = r"epsilon of the whole: give .* epsilon=result\.epsilon"
    small = numbered(8, 3), numbered(9, 8)
    few = r"halves of 4 rows, .* hold two of each of the 3 classes"
    for sides, settings, message in (
        (pair, {}, whole),
        (pair, {"epsilon": None}, whole),
        (pair, {"epsilon_relative": 0.1}, whole),
        (small, {"labels": "means", "epsilon": 0.1}, "min_class_size=4"),
        ((numbered(8), numbered(9, 8, 7)), {"labels": "means", "epsilon": 0.1}, few),
    ):
        with pytest.raises(InputError, match=message):
            noise_floor(*sides, **settings)
    assert noise_floor(*small, labels="means", epsilon=100.0, min_class_size=4).size == 4
    # Labels that do not count do not limit the halves.
    assert noise_floor(numbered(8, 3), numbered(6, 6), labels="none", epsilon=100.0).size == 5


def test_a_draw_depends_on_its_number_alone():
    """As ranks share them."""
    draw = torch.Generator().manual_seed(0)
    sides = [LabeledSamples(torch.randn(9, 1, generator=draw), None, ()) for _ in range(2)]

    def distance(x, y):
        return SimpleNamespace(value=float(x.features.sum() - y.features.sum()))

    drawn = SimpleNamespace(source=sides[0], target=sides[1], distance=distance)
    whole, some = (
        subsampling._values(drawn, (4, 3), wanted, 0, None) for wanted in (range(5), range(1, 5, 2))
    )
    assert len(set(whole)) == 5
    assert some == whole[1::2]
