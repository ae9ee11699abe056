"""Statistics of pairs of tasks: against scipy, loops, and simulations with known truths."""

import math
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from scipy import stats

from experiments.interval_coverage import Design, coverage, dyads
from otdd_flash.study import statistics as permutation
from otdd_flash.study.findings import choices, findings
from otdd_flash.study.statistics import (
    PairTable,
    Replicates,
    best_gains,
    ceiling,
    correlation_interval,
    difference_interval,
    freed_of_sizes,
    number_interval,
    orders_of,
    p_value,
    partial_spearman,
    pearson,
    regret,
    replicates,
    spearman,
    spearman_over_sources,
)
from otdd_flash.study.training import gain_errors, gains, halved_gains


def some_table(tasks=6, *, holes=3, seed=0):
    """Rounded numbers, so that some are equal, with pairs that are missing."""
    generator = np.random.default_rng(seed)
    measure = np.round(3 * generator.random((tasks, tasks)), 1)
    gains = np.round(10 * generator.random((tasks, tasks)))
    for i, j in generator.integers(tasks, size=(holes, 2)):
        gains[i, j] = np.nan
    np.fill_diagonal(gains, np.nan)
    return PairTable(measure, gains, [str(k) for k in range(tasks)])


def on_all_runs(table):
    """The regret whose best source is picked and scored by the same runs."""
    return regret(table.gains[None], table.gains[None])


def value(statistic, table):
    return float(statistic(table.measure[None], table.gains, table.present[None])[0])


@pytest.mark.parametrize("seed", range(2))
def test_correlations_over_pairs_are_those_of_scipy(seed):
    table = some_table(seed=seed)
    both = table.measure[table.present], table.gains[table.present]
    assert value(pearson, table) == pytest.approx(stats.pearsonr(*both).statistic, abs=1e-12)
    assert value(spearman, table) == pytest.approx(stats.spearmanr(*both).statistic, abs=1e-12)
    by_target = [
        stats.spearmanr(table.measure[rows, column], table.gains[rows, column]).statistic
        for column, rows in enumerate(table.present.T)
        if rows.sum() >= 3
    ]
    found = value(spearman_over_sources, table)
    assert found == pytest.approx(np.nanmean(by_target), abs=1e-12)


def test_regret_is_what_a_user_loses_by_the_measure():
    gains = np.array([[np.nan, 1.0, 7.0], [4.0, np.nan, 2.0], [6.0, 5.0, np.nan]])
    near = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [2.0, 3.0, 0.0]])
    # Chosen are the sources 1, 0, 1, best 2, 2, 0.
    table = PairTable(-near, gains, "abc")
    lost = on_all_runs(table)
    assert value(lost, table) == pytest.approx((2 + 4 + 5) / 3)
    assert value(lost, PairTable(near, gains, "abc")) == pytest.approx(0)
    # Of tied sources any may be chosen, in whatever order they stand: their mean counts.
    assert value(lost, PairTable(np.ones((3, 3)), gains, "abc")) == pytest.approx((1 + 2 + 2.5) / 3)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_halves_of_the_seeds_share_no_run_and_their_mean_is_the_gain(seeds):
    generator = np.random.default_rng(seeds)
    errors, alone = generator.integers(5, 90, (4, 4, seeds)), generator.integers(20, 90, (4, seeds))
    picking, scoring = halved_gains(errors, alone)
    for side in (picking, scoring):
        np.testing.assert_allclose(side.mean(0), gains(errors, alone), rtol=1e-12, atol=1e-12)
    if seeds > 1:
        # One run changes one side of every direction, never both.
        moved = errors.copy()
        moved[0, 1, 0] += 1
        after = halved_gains(moved, alone)
        changed = [(after[side] != (picking, scoring)[side])[:, 0, 1] for side in (0, 1)]
        assert (changed[0] ^ changed[1]).all()


def picked(runs, gap):
    """How often source 1 is picked of two by so many runs, a tie counting half."""
    signs = [*product((-1.0, 1.0), repeat=runs)]
    means = np.array([np.mean(one) for one in signs])
    gaps = (means + gap)[:, None] - means
    return np.mean((gaps > 1e-12) + 0.5 * (np.abs(gaps) <= 1e-12))


@pytest.mark.parametrize("seeds", [2, 3])
@pytest.mark.parametrize("gap", [0.0, 0.5, 1.0])
def test_a_regret_is_unbiased_for_what_the_source_that_half_of_the_runs_pick_is_worth(gap, seeds):
    """Over all outcomes of runs that are 1 above or below: of equal sources none wins by luck."""
    outcomes = np.array([*product((-1.0, 1.0), repeat=2 * seeds)])
    noise = outcomes.reshape(-1, 2, seeds).transpose(1, 0, 2)
    truth = np.array([0.0, gap])[:, None, None]
    # Baselines of 100 errors: a gain is a number of errors.
    alone, mask = np.full((len(outcomes), seeds), 100.0), np.ones((1, 2, len(outcomes)), bool)
    runs = 100 - truth - noise
    whole = gains(runs, alone)
    lost = best_gains(mask, *halved_gains(runs, alone))[0] - whole[0]
    by_halves = {2: [1, 1], 3: [1, 2]}[seeds]
    assert lost.mean() == pytest.approx(gap * np.mean([picked(k, gap) for k in by_halves]))
    # Picked and scored on the same runs it would be larger.
    assert best_gains(mask, whole[None], whole[None])[0].mean() > lost.mean()


def regretted(generator, design):
    """Simulated pairs whose gains were measured by five seeds, and the statistic of regrets."""
    table = dyads(generator, design)
    runs = table.gains[..., None] + generator.standard_normal((*table.gains.shape, 5))
    alone = np.full((len(runs), 5), 100.0)
    measured = replace(table, gains=gains(100 - runs, alone))
    return measured, regret(*halved_gains(100 - runs, alone))


@pytest.mark.slow
@pytest.mark.parametrize("design", [Design(5, None, 0.0, 0.6), Design(12, 6, 0.8, 0.6)], ids=str)
def test_intervals_hold_the_mean_regret_in_90_of_100_simulations(design):
    """By 100 simulations of 5 tasks, and of 12 in 6 families, for the mean of 400."""
    generator = np.random.default_rng(0)
    drawn = [regretted(generator, design) for _ in range(400)]
    truth = np.mean([value(lost, table) for table, lost in drawn])
    intervals = [number_interval(replicates(table, lost)) for table, lost in drawn[:100]]
    assert np.mean([lower <= truth <= upper for _, lower, upper in intervals]) >= 0.9


def test_choices_are_those_of_a_loop_over_targets():
    generator = np.random.default_rng(4)
    errors = generator.integers(20, 40, (5, 5, 3)).astype(float)
    alone = generator.integers(40, 50, (5, 3)).astype(float)
    errors[0, 4] = np.nan
    measure = generator.integers(0, 3, (5, 5)).astype(float)
    table = PairTable(measure, gains(errors, alone), list("aabcd"))
    errors_of = gain_errors(errors, alone)
    sizes, names = [30, 70, 70, 10, 20], list("vwxyz")
    for own_family in (True, False):
        rows = choices(
            "otdd",
            table,
            halved_gains(errors, alone),
            errors_of,
            names=names,
            sizes=sizes,
            own_family=own_family,
        )
        assert [row.target for row in rows] == names
        for j, row in enumerate(rows):
            sources = [i for i in range(5) if i != j and (i, j) != (0, 4)]
            if not own_family:
                sources = [i for i in sources if {i, j} != {0, 1}]
            gain = {i: 100 * (1 - errors[i, j].mean() / alone[j].mean()) for i in sources}
            best = max(gain, key=gain.get)
            scored = []
            # Rotations of three seeds: each alone against both others, either way.
            for one in range(3):
                halves = [one], [k for k in range(3) if k != one]
                for picks, scores in (halves, halves[::-1]):
                    fewest = min(errors[i, j, picks].mean() for i in sources)
                    tied = [i for i in sources if errors[i, j, picks].mean() == fewest]
                    scored += [np.mean([errors[i, j, scores].mean() for i in tied])]
            expected = 100 * (1 - np.mean(scored) / alone[j].mean())
            assert row.gain == pytest.approx(expected)
            assert (row.best, row.sources) == (names[best], len(sources))
            assert row.gain_error == pytest.approx(errors_of[best, j])
            near = [i for i in sources if gain[i] >= gain[best] - errors_of[best, j] and i != best]
            assert row.tied == tuple(names[i] for i in near)
            for keys, taken, lost in (
                (measure[:, j], row.chosen, row.regret),
                (np.array(sizes), row.largest, row.largest_regret),
            ):
                first = [i for i in sources if keys[i] == max(keys[sources])]
                assert taken == tuple(names[i] for i in first)
                assert lost == pytest.approx(expected - np.mean([gain[i] for i in first]))
            assert row.random_regret == pytest.approx(expected - np.mean([*gain.values()]))


def test_the_jackknife_is_the_formula_over_units():
    table = some_table(tasks=6)
    found = replicates(table, spearman)
    left = []
    for unit in range(6):
        kept = [k for k in range(6) if k != unit]
        part = np.ix_(kept, kept)
        smaller = PairTable(table.measure[part], table.gains[part], kept)
        left.append((value(spearman, smaller), smaller.count))
    z = np.array([math.atanh(np.clip(rho, -1 + 1 / n, 1 - 1 / n)) for rho, n in left])
    error = math.sqrt(5 / 6 * ((z - z.mean()) ** 2).sum())
    reach = stats.t.ppf(0.975, 5) * error
    centre = math.atanh(value(spearman, table))
    lower, upper = correlation_interval(found)[1:]
    assert (lower, upper) == pytest.approx((math.tanh(centre - reach), math.tanh(centre + reach)))
    plain = np.array([rho for rho, _ in left])
    reach = stats.t.ppf(0.975, 5) * math.sqrt(5 / 6 * ((plain - plain.mean()) ** 2).sum())
    assert number_interval(found)[1] == pytest.approx(found.value - reach)
    # A perfect correlation is clipped by its pairs.
    interval = correlation_interval(Replicates(1.0, np.ones(6), 30, np.full(6, 20.0)))
    assert (interval.value, interval.lower) == (1, pytest.approx(1 - 1 / 30))


def test_a_unit_is_a_family():
    table = some_table(tasks=6, holes=0)
    paired = PairTable(table.measure, table.gains, list("aabbcc"))
    masks = paired.without_each_unit()
    assert paired.units == ("a", "b", "c")
    assert [int(mask.sum()) for mask in masks] == [12, 12, 12]
    assert not masks[0][:2].any()
    assert not masks[0][:, :2].any()
    # The difference of a measure from itself is 0.
    found = replicates(some_table(), spearman)
    for correlations in (True, False):
        interval = difference_interval(found, found, correlations=correlations)
        assert interval == (0.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("families", [list("aabbbc"), list("abcde")])
def test_p_is_the_share_of_all_permutations(families):
    tasks = len(families)
    table = some_table(tasks, seed=1)
    table = PairTable(table.measure, table.gains, families)
    observed = value(spearman, table)
    hits = tried = 0
    for order in permutations(range(tasks)):
        if families[0] == families[1] and [families[k] for k in order] != families:
            continue
        moved = PairTable(table.measure[np.ix_(order, order)], table.gains, families)
        present = table.present & table.present[np.ix_(order, order)]
        both = moved.measure[present], moved.gains[present]
        hits += abs(stats.spearmanr(*both).statistic) >= abs(observed) - 1e-12
        tried += 1
    assert p_value(table, spearman, 0) == hits / tried
    assert tried == (120 if families[0] != families[1] else 12)


def test_permutations_that_leave_no_pairs_are_not_counted():
    """Every choice costs nothing, so that all permutations that are defined are hits."""
    gains = np.full((4, 4), np.nan)
    gains[[0, 1, 2], 3] = gains[[0, 1, 3], 2] = 0.0
    table = PairTable(np.random.default_rng(0).normal(size=(4, 4)), gains, list("abcd"))
    assert p_value(table, on_all_runs(table), 0, small=True) == 1


def test_above_seven_tasks_permutations_are_drawn(monkeypatch):
    monkeypatch.setattr(permutation, "RANDOM", 999)
    generator = np.random.default_rng(0)
    strong, none = (dyads(generator, Design(9, None, rho)) for rho in (0.95, 0.0))
    assert p_value(strong, spearman, 0) == 1 / 1000
    assert p_value(none, spearman, 0) > 0.05
    assert p_value(strong, on_all_runs(strong), 0, small=True) < 0.05
    assert not orders_of(strong.families, 0)[1]


def test_a_partial_correlation_is_that_of_residuals_of_ranks():
    table = some_table(tasks=7, holes=4)
    sizes = [30, 50, 80, 40, 90, 55, 61]
    sources, targets = np.nonzero(table.present)
    design = np.stack((np.ones(len(sources)), *(np.log(sizes)[k] for k in (sources, targets))), 1)
    left = []
    for side in (table.measure, table.gains):
        ranked = stats.rankdata(side[table.present])
        left.append(ranked - design @ np.linalg.solve(design.T @ design, design.T @ ranked))
    expected = stats.pearsonr(*left).statistic
    given = partial_spearman(sizes)
    assert value(given, table) == pytest.approx(expected, abs=1e-9)
    # What is permuted has the same statistic before it is.
    assert value(pearson, freed_of_sizes(table, sizes)) == pytest.approx(expected, abs=1e-9)


def test_the_ceiling_is_the_correlation_with_gains_without_noise():
    generator = np.random.default_rng(0)
    truth = generator.standard_normal((40, 40))
    runs = truth + 1.5 * generator.standard_normal((5, 40, 40))

    def gains_of(pair):
        return runs[list(pair)].mean(0)

    found = ceiling(gains_of, 5, pearson)
    mask = ~np.eye(40, dtype=bool)
    expected = float(pearson(truth[None], runs.mean(0), mask[None])[0])
    assert found == pytest.approx(expected, abs=0.02)
    assert ceiling(gains_of, 3, pearson) is None
    # Gains that turn round from one half of the seeds to the other repeat in no way.
    assert ceiling(lambda pair: truth * (1 if 0 in pair else -1), 4, pearson) is None


def rows_of(tables, sizes, gains, seeds=5):
    found = findings(
        tables,
        sizes=sizes,
        halves=(gains[None], gains[None]),
        gains_of=lambda pair: gains,
        seeds=seeds,
        seed=0,
    )
    rows = {(row.measure, row.statistic): row for row in found}
    assert len(rows) == len(found)
    return rows


def test_findings_have_a_row_for_everything():
    one = dyads(np.random.default_rng(0), Design(6, None, 0.9))
    other = PairTable(one.measure, one.gains, one.families)
    rows = rows_of({"one": one, "other": other}, [10, 20, 30, 40, 50, 60], one.gains)
    assert len(rows) == 2 * 7 + 4 + 2
    for statistic in ("spearman", "regret"):
        assert rows["one", statistic][2:] == rows["other", statistic][2:]
    assert rows["one - other", "spearman"].value == 0
    assert rows["gains", "ceiling_spearman"].value == pytest.approx(1)
    table = some_table(tasks=4)
    rows = rows_of({"one": table}, [9] * 4, table.gains, seeds=2)
    # Of equal sizes there is no partial correlation.
    assert ("one", "partial_spearman") not in rows
    notes = [row.note for (name, _), row in rows.items() if name == "one" and row.value]
    assert all("5 are needed" in note for note in notes)


def test_what_is_not_defined_says_why():
    """Three pairs in a circle: every target has one source, and as many sizes explain all ranks."""
    gains = np.full((3, 3), np.nan)
    gains[[0, 1, 2], [1, 2, 0]] = 1.0, 2.0, 4.0
    measure = np.random.default_rng(0).normal(size=(3, 3))
    rows = rows_of({"m": PairTable(measure, gains, list("abc"))}, [10, 20, 50], gains)
    none = "not defined: no target has"
    for statistic, note in (
        ("spearman_over_sources", f"{none} three sources that differ in measure and in gain"),
        ("partial_spearman", "not defined: given the sizes nothing of the ranks is left"),
        ("regret", f"{none} two sources"),
    ):
        assert rows["m", statistic].value is None
        assert rows["m", statistic].note == note
    assert rows["m", "spearman"].value is not None


DESIGNS = [Design(20, None, 0.5, 0.6, symmetric=True), Design(12, 4, 0.8, 0.3)]


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_intervals_hold_the_correlation_in_90_of_100_simulations(design):
    """By 200 simulations, of which 90% are 3.2 deviations below the 95% that is meant."""
    rows = coverage(design, 200, seed=0)
    assert min(row["coverage"]["jackknife"] for row in rows) >= 0.9
