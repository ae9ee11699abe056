"""Rankings are those of full solves, also when they are stopped, and say what is proven."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranking.libraries import dataset, library, truth
from spying import calls_of

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.ranking import bounds, race
from otdd_flash.solver.term import UnreachableTolerance

TIE = 1e-4
# Intervals hold by themselves; the reference is as exact as this.
EXACT = 1e-7


def check(ranking, values, k, *, ordered):
    """Every interval holds, and no place that is called proven is another's."""
    places = sorted(values, key=values.get)
    kth = values[places[k - 1]]
    assert len(ranking.rows) == k
    assert {row.name for row in (*ranking.rows, *ranking.others)} == set(values)
    for row in (*ranking.rows, *ranking.others):
        assert row.lower - EXACT <= values[row.name] <= row.upper + EXACT, row
        assert math.isnan(row.value) or row.lower <= row.value <= row.upper, row
    for place, row in enumerate(ranking.rows):
        if row.proven:
            assert values[row.name] <= kth + TIE + EXACT, (row, kth)
            if ordered:
                assert abs(values[row.name] - values[places[place]]) <= TIE + EXACT, row
        for name in row.tied:
            width = max(TIE, 2 * (row.upper - row.lower))
            assert abs(values[row.name] - values[name]) <= width + EXACT, (row, name)
    assert ranking.certified == all(row.proven for row in ranking.rows)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("fives", range(60))
def test_rankings_are_those_of_full_solves(fives, monkeypatch):
    """300 libraries, whose places are all proven; then stopped by time after so many budgets."""
    for seed in range(5 * fives, 5 * fives + 5):
        query, members = library(seed)
        rng = np.random.default_rng(seed)
        k, ordered = int(rng.integers(1, len(members) + 1)), bool(seed % 2)
        index = otdd.index(members, epsilon_relative=float(rng.choice([0.01, 0.05, 0.2])))
        values = truth(query, members, index.settings.epsilon)
        ranking = otdd.nearest(query, index, k, ordered=ordered)
        check(ranking, values, k, ordered=ordered)
        assert ranking.certified == (ranking.stopped_by == "proven")
        # Only what rounding at a small epsilon does not tell apart is left open.
        assert all(row.proven or row.tied for row in ranking.rows), seed
        assert ranking.certified or (seed % 5 == 0 and ranking.stopped_by == "rounding"), seed
        # A clock that ticks whenever it is read.
        with monkeypatch.context() as patched:
            ticks = count()
            patched.setattr(race.time, "perf_counter", lambda ticks=ticks: float(next(ticks)))
            stopped = otdd.nearest(
                query, index, k, ordered=ordered, max_seconds=float(rng.integers(1, 9))
            )
        check(stopped, values, k, ordered=ordered)


def test_stopped_before_anything_is_solved_nothing_is_proven_but_the_query_itself():
    query, members = library(1)
    ranking = otdd.nearest(query, {**members, "itself": query}, 2, max_seconds=1e-9)
    assert ranking.stopped_by == "max_seconds"
    first, second = ranking.rows
    assert first == ("itself", 0.0, 0.0, 0.0, True, ())
    assert not second.proven
    assert math.isinf(second.upper)
    assert not ranking.certified
    assert "1 of 2 places are proven, the solve stopped by max_seconds" in str(ranking)
    assert ranking.cost.touched == 0
    assert "0 of 5 cross terms were begun and 0 solved to the end" in ranking.sentences()


def test_the_query_itself_is_first_even_where_another_value_is_below_zero(monkeypatch):
    query, members = library(1)
    alone = otdd.nearest(query, {"itself": query, **members}, 1)
    assert [row.name for row in alone.rows] == ["itself"]
    assert alone.certified
    assert alone.cost.touched == 0


def far_and_near():
    """A query, two members near it, and many whose moments alone put them far away."""
    rng = np.random.default_rng(0)
    query = dataset(rng, 3)
    near = {
        f"near {k}": otdd.LabeledSamples(query.features + shift, query.labels, query.class_names)
        for k, shift in enumerate((0.05, 0.4))
    }
    far = {
        f"far {k}": otdd.LabeledSamples(query.features + 9 + k, query.labels, query.class_names)
        for k in range(12)
    }
    return query, {**far, **near}


def test_members_that_moments_put_far_away_are_never_solved():
    query, members = far_and_near()
    ranking = otdd.nearest(query, otdd.index(members), 2)
    assert [row.name for row in ranking.rows] == ["near 0", "near 1"]
    assert ranking.certified
    assert ranking.cost.members == 14
    assert ranking.cost.touched == 2
    assert all(math.isnan(row.value) for row in ranking.others)
    # Their bounds are proven all the same.
    values = truth(query, members, ranking.details["epsilon"])
    check(ranking, values, 2, ordered=False)


def test_class_distances_are_measured_of_survivors_alone(monkeypatch):
    query, members = far_and_near()
    index = otdd.index(members)
    asked = calls_of(monkeypatch, race, "class_tables")
    otdd.nearest(query, index, 2)
    # The query's own, and those of the two near ones.
    assert [pair for _, wanted, *_ in asked for pair in wanted] == [(0, 0), (0, 1), (0, 1)]


def test_budgets_go_on_from_the_potentials_of_those_before(monkeypatch):
    query, members = library(3)
    index = otdd.index(members)
    solves = calls_of(monkeypatch, bounds, "solve_divergence")
    otdd.nearest(query, index, 2, ordered=True)
    starts = [(options.max_iterations, *start) for _, options, *start in solves]
    assert starts[0] in ((2,), (2, None))
    later = [start for most, *start in starts if most != 2]
    assert later
    assert all(len(start["xy"]) > 0 for (start,) in later)


@pytest.mark.parametrize("seconds", [None, 1e-9])
def test_each_end_takes_the_opposite_ends_of_both_self_terms(seconds, monkeypatch):
    """Self terms that are known within an interval widen that of the value, each its own way."""
    query, members = library(3)
    index = otdd.index(members)
    values = truth(query, members, index.settings.epsilon)

    def widened(one):
        return one._replace(bounds=(one.value - 1, one.value + 2))

    entries = tuple(replace(entry, term=widened(entry.term)) for entry in index.entries)
    real = race.self_terms
    monkeypatch.setattr(race, "self_terms", lambda *given: [widened(one) for one in real(*given)])
    ranking = otdd.nearest(
        query, replace(index, entries=entries), len(members), ordered=True, max_seconds=seconds
    )
    for row in ranking.rows:
        # With both self terms at their upper ends the value is less by 2, else more by 1.
        assert row.lower <= values[row.name] - 2 + EXACT
        assert row.upper >= values[row.name] + 1 - EXACT
        if seconds is None:
            assert row.lower >= values[row.name] - 2.1
            assert row.upper <= values[row.name] + 1.1


def test_equal_values_end_in_a_tie():
    query, members = library(0)
    names = ["m0", "turned"]
    index = otdd.index({name: members[name] for name in names}, epsilon_relative=0.1)
    ranking = otdd.nearest(query, index, 1)
    assert ranking.certified
    (row,), (other,) = ranking.rows, ranking.others
    assert row.tied == (other.name,)
    assert row.upper - row.lower <= TIE
    assert any("is as near as" in sentence for sentence in ranking.sentences())
    # Without ties nothing can separate them: rounding ends the race, and it says so.
    strict = otdd.nearest(query, index, 1, tie=0.0)
    assert strict.stopped_by == "rounding"
    assert not strict.certified
    assert strict.rows[0].tied == (strict.others[0].name,)
    assert strict.sentences()[-1].startswith("an index of precision=double tells more")


@pytest.mark.parametrize("seed", range(5))
def test_ties_are_those_of_every_two_candidates(seed):
    rng = np.random.default_rng(seed)
    some = []
    for k in range(30):
        lower = rng.choice([0.0, 0.5, 1.0]) + rng.choice([0, 0.4, 0.9]) * TIE
        upper = lower + rng.choice([0, 0.3 * TIE, 0.8 * TIE, 3 * TIE, 0.7, math.inf])
        entry = SimpleNamespace(name=f"m{k}")
        some.append(race._Candidate(entry, lower, upper, last=bool(rng.integers(2))))
    found = race._Race._ties(SimpleNamespace(candidates=some, tie=TIE))
    for one in some:
        expected = set()
        for other in some:
            reach = max(one.upper, other.upper) - min(one.lower, other.lower)
            overlap = max(one.lower, other.lower) < min(one.upper, other.upper)
            if other is not one and (reach <= TIE or (one.last and other.last and overlap)):
                expected.add(other.entry.name)
        assert sorted(found[one]) == sorted(expected)


def test_the_values_of_all_members_are_solved_a_few_at_a_time(monkeypatch):
    """Where k is the number of members all places are proven, and all rows would be in memory."""
    query, members = library(2)
    solves = calls_of(monkeypatch, race, "cross_terms")
    ranking = otdd.nearest(query, members, len(members))
    assert ranking.cost.finished == len(members)
    assert {len(problems) for _, problems in solves} == {1}


def test_a_gpu_begins_as_many_members_together_as_before(monkeypatch):
    query, members = library(3)
    solves = calls_of(monkeypatch, race, "cross_terms")
    monkeypatch.setattr(bounds.Terms, "takes_many", lambda self, x, y: True)
    monkeypatch.setattr(race, "AT_ONCE", 2)
    index = otdd.index(
        dict(list(members.items())[:3])
        | {
            f"copy {k}": otdd.LabeledSamples(query.features + k, query.labels, query.class_names)
            for k in range(1, 8)
        }
    )
    otdd.nearest(query, index, len(index), tie=0.0)
    assert [len(problems) for _, problems in solves[:3]] == [2, 2, 4]
    solves.clear()
    monkeypatch.setattr(race, "MOST_ENTRIES", 1)
    otdd.nearest(query, index, len(index), tie=0.0)
    assert max(len(problems) for _, problems in solves) == 2


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(6))
def test_many_side_by_side_give_the_same_ranking(seed, monkeypatch):
    """As on a GPU: new cross terms of one query are solved together, to the end."""
    query, members = library(seed)
    index = otdd.index(members)
    alone = otdd.nearest(query, index, 2)
    monkeypatch.setattr(bounds.Terms, "takes_many", lambda self, x, y: True)
    together = otdd.nearest(query, index, 2)
    assert together.certified
    values = truth(query, members, index.settings.epsilon)
    check(together, values, 2, ordered=False)
    assert [row.name for row in together.rows] == [row.name for row in alone.rows]
    assert together.cost.touched >= 2


@pytest.mark.slow(after=7)
@pytest.mark.parametrize(
    ("given", "compared"),
    [
        ({"epsilon": 0.0}, {"epsilon": 0.0}),
        ({"epsilon": 0.5, "unbalanced": 1.0}, {"epsilon": 0.5, "unbalanced": 1.0}),
        ({"ground": "cosine"}, {"ground": "cosine"}),
        ({"ground": "inner", "labels": "none"}, {"ground": "inner", "labels": "none"}),
        ({"labels": "means", "lambda_y": 2.0}, {"labels": "means", "lambda_y": 2.0}),
        ({"lambda_x": 0.0}, {"lambda_x": 0.0}),
        ({"compute": otdd.ComputeOptions(precision="double")}, {}),
        ({"labels": "sinkhorn", "epsilon": 1.0}, {"labels": "sinkhorn"}),
        ({"labels": "exact"}, {"labels": "exact"}),
    ],
    ids=str,
)
def test_settings_of_an_index_are_those_of_distances(given, compared):
    """Values are those of `dataset_distance`, at epsilon 0, of relaxed marginals, of any ground."""
    query, members = library(7)
    index = otdd.index(members, **given)
    ranking = otdd.nearest(query, index, 2, ordered=True)
    assert ranking.certified
    epsilon = index.settings.epsilon
    solver = None if epsilon == 0 else otdd.Converged(tolerance=1e-5)
    double = otdd.ComputeOptions(precision="double")
    arguments = {"solver": solver, "compute": double, "epsilon": epsilon, **compared}
    values = {name: otdd.dataset_distance(query, one, **arguments) for name, one in members.items()}
    places = sorted(values, key=lambda name: values[name].value)
    assert [row.name for row in ranking.rows] == places[:2]
    for row in (*ranking.rows, *ranking.others):
        lower, upper = values[row.name].bounds
        assert row.lower <= upper + 1e-9, row
        assert row.upper >= lower - 1e-9, row


def test_unlabelled_rows_are_ranked_without_labels():
    query, members = library(2)
    plain = {name: one.features for name, one in members.items()}
    ranking = otdd.nearest(query.features, otdd.index(plain, labels="none"), 2)
    assert ranking.certified
    with pytest.raises(InputError, match="query has no labels, which labels=gaussian"):
        otdd.nearest(query.features, otdd.index(members), 2)


def test_another_epsilon_is_refused_or_rebuilt():
    query, members = library(4)
    index = otdd.index(members, epsilon=0.5)
    assert otdd.nearest(query, index, 1, epsilon=0.5).certified
    with pytest.raises(InputError, match=r"built with epsilon=0.5, not 1, .* rebuild=true"):
        otdd.nearest(query, index, 1, epsilon=1.0)
    ranking = otdd.nearest(query, index, 2, epsilon=1.0, rebuild=True)
    check(ranking, truth(query, members, 1.0), 2, ordered=False)


def test_refusals_and_notices():
    query, members = library(2)
    index = otdd.index(members)
    other = otdd.LabeledSamples(torch.zeros(4, 9), [0, 0, 1, 1], ("a", "b"))
    with pytest.raises(InputError, match="the query has 9 features, and the members"):
        otdd.nearest(other, index, 1)
    with pytest.raises(InputError, match=r"library must be an index of otdd.index, its folder"):
        otdd.nearest(query, 3, 1)
    with pytest.raises(InputError, match="the library is empty"):
        otdd.nearest(query, {}, 1)
    with pytest.raises(InputError, match="precision=fast, got double"):
        otdd.nearest(query, index, 1, compute=otdd.ComputeOptions(precision="double"))
    with pytest.warns(DataNotice, match=r"k=99 is above the \d members"):
        ranking = otdd.nearest(query, index, 99)
    assert len(ranking.rows) == len(members)
    assert ranking.certified
    assert not ranking.others


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(6))
def test_the_value_of_one_row_is_within_its_interval(seed):
    """Budgets whose intervals share less than each has leave the last value outside."""
    rng = np.random.default_rng(seed)
    _, members = library(seed)
    index, dim = otdd.index(members), next(iter(members.values())).dim
    for _ in range(3):
        one = otdd.LabeledSamples(rng.normal(size=(1, dim)).astype("f4"), [0], ("a",))
        for row in otdd.nearest(one, index, 3, ordered=True).rows:
            assert row.lower <= row.value <= row.upper, row


def test_a_member_that_rounding_keeps_from_its_tolerance_has_the_interval_of_its_moments(
    monkeypatch,
):
    """It may be among the first k, or not; what is proven of the others stays."""
    query, members = library(3)
    index = otdd.index(members)
    values = truth(query, members, index.settings.epsilon)
    nearest = min(values, key=values.get)
    real = bounds.Terms._solved

    def solve(self, compared, options, before, *, own):
        sizes = len(compared.transformed[1]), len(query)
        if sizes[0] == len(members[nearest]) and not own:
            raise UnreachableTolerance("too small for float32")
        return real(self, compared, options, before, own=own)

    monkeypatch.setattr(bounds.Terms, "_solved", solve)
    assert sum(len(one) == len(members[nearest]) for one in members.values()) == 1
    ranking = otdd.nearest(query, index, 2, ordered=True)
    check(ranking, values, 2, ordered=True)
    assert ranking.stopped_by == "rounding"
    (row,) = (row for row in (*ranking.rows, *ranking.others) if row.name == nearest)
    assert math.isnan(row.value)
    assert math.isinf(row.upper)


def test_values_of_the_first_are_solved_to_the_default_tolerance_whatever_the_tie():
    query, members = library(2)
    index = otdd.index(members)
    with pytest.warns(DataNotice, match="lower tie"):
        ranking = otdd.nearest(query, index, 2, tie=1e9)
    values = truth(query, members, index.settings.epsilon)
    for row in ranking.rows:
        assert row.value == pytest.approx(values[row.name], abs=1e-4)


def test_too_few_subsamples_are_refused_before_anything_is_solved(monkeypatch):
    query, members = library(2)
    index = otdd.index(members)
    monkeypatch.setattr(race._Race, "run", None)
    with pytest.raises(InputError, match="at least 39 subsamples, got 5"):
        otdd.nearest(query, index, 1, subsample=5)


def test_a_tie_beyond_the_costs_is_told():
    query, members = library(2)
    small = {
        name: otdd.LabeledSamples(1e-3 * one.features, one.labels, one.class_names)
        for name, one in members.items()
    }
    near = otdd.LabeledSamples(1e-3 * query.features, query.labels, query.class_names)
    with pytest.warns(DataNotice, match=r"tie=0.0001 is large beside the mean cost .*; lower tie"):
        otdd.nearest(near, small, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        otdd.nearest(near, small, 1, tie=1e-9)


def test_sampling_intervals_say_which_places_they_do_not_separate():
    query, members = library(6)
    near = otdd.LabeledSamples(query.features + 0.01, query.labels, query.class_names)
    nearer = otdd.LabeledSamples(query.features + 0.02, query.labels, query.class_names)
    given = {"near": near, "nearer": nearer, "far": members["m0"]}
    ranking = otdd.nearest(query, given, 2, subsample=39)
    assert [one["name"] for one in ranking.details["sampling"]] == [
        row.name for row in ranking.rows
    ]
    said = ranking.sentences()
    assert "places 1 and 2 differ by less than their sampling error" in said
    one = ranking.details["sampling"][0]
    shown = f"sampling intervals: {one['name']} [{one['lower']:.4g}, {one['upper']:.4g}], "
    assert any(sentence.startswith(shown) for sentence in said)


def test_a_ranking_as_table_and_as_json():
    query, members = library(2)
    ranking = otdd.nearest(query, members, 2)
    frame = ranking.to_frame()
    assert list(frame.columns) == ["name", "value", "lower", "upper", "proven", "tied"]
    assert list(frame.name[:2]) == [row.name for row in ranking.rows]
    content = ranking.to_dict()
    assert content["certified"] is True
    assert content["cost"]["members"] == len(members)
    assert content["settings"]["metric"]["method"] == "gaussian"
    assert next(iter(content)) == "query"
    assert "details" not in content
    # What a property may keep is no field.
    vars(ranking)["kept"] = object()
    assert ranking.to_dict() == content
    assert repr(ranking).startswith("Ranking(")
