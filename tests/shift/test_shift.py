"""`shift_test`: the statistic and its bounds, counting, groups, parts, effects and refusals."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch
from reference import dense_cost, sinkhorn_divergence
from refusals import naming
from scipy.stats import chi2_contingency

import otdd_flash as otdd
from otdd_flash import ClassDistances, InputError, LabeledSamples
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import DataNotice
from otdd_flash.integrations.detector import ShiftDetector
from otdd_flash.labels import Gaussian, NoLabels, class_distances
from otdd_flash.shift import pooled as pooled_module
from otdd_flash.shift.effect import measure_effect
from otdd_flash.shift.joint import spent
from otdd_flash.shift.parts import describe, family_of, holm
from otdd_flash.shift.pooled import (
    PermutationTest,
    PooledCost,
    Until,
    draws,
    label_test,
    permutation_test,
    rejects,
)
from otdd_flash.shift.rows import PooledRows

CPU = torch.device("cpu")


def side(
    generator: np.random.Generator, n: int, d: int = 3, shift: float = 0.0, *, weights: bool = False
) -> LabeledSamples:
    labels = generator.integers(0, 3, n)
    labels[:3] = range(3)
    features = generator.normal(size=(n, d)) + labels[:, None] + shift
    masses = generator.exponential(size=n) if weights else None
    return LabeledSamples.from_arrays(features, labels, masses)


def pool(
    one: LabeledSamples, other: LabeledSamples, relative: float = 0.1, **more
) -> tuple[PooledRows, PooledCost]:
    metric = more.pop("metric", Gaussian())
    rows = PooledRows.of(one, other, metric, more.pop("groups", None))
    cost = rows.cost(GroundCost(**more), metric, CPU)
    return rows, PooledCost(cost, rows.samples.masses, None, relative)


def sides_of(rows: PooledRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses of the rows as they are and of permutations."""
    units = np.hstack((rows.unit_in_reference[:, None], *draws(rows, count, 0, count)))
    return rows.sides(units, CPU)


@pytest.mark.parametrize("ground", ["sqeuclidean", "cosine", "inner"])
def test_the_statistic_is_the_dataset_distance_at_pooled_class_distances(ground):
    generator = np.random.default_rng(0)
    one, other = side(generator, 25, weights=True), side(generator, 33, shift=0.3, weights=True)
    labels = "none" if ground == "inner" else "gaussian"
    report = otdd.shift_test(
        one, other, permutations=19, labels=labels, ground=ground, parts=False, compute="cpu"
    )
    table = None
    if labels == "gaussian":
        both = LabeledSamples.from_arrays(
            torch.cat((one.features, other.features)),
            torch.cat((one.labels, other.labels)),
            torch.cat((one.weights * one.mass, other.weights * other.mass)),
        )
        full = class_distances([both], ground=ground).full
        table = ClassDistances(full, full, full)
    exact = otdd.dataset_distance(
        one,
        other,
        epsilon=report.epsilon,
        labels=labels,
        class_distances=table,
        ground=ground,
        compute=otdd.ComputeOptions("cpu", precision="double"),
        solver=otdd.Converged(tolerance=1e-8),
    )
    assert exact.value == pytest.approx(report.statistic, rel=1e-6)
    assert report.bounds[0] <= exact.bounds[1]
    assert exact.bounds[0] <= report.bounds[1]
    assert report.bounds[1] - report.bounds[0] <= 1e-4 * report.statistic


def labelled_otherwise(
    kind: str, generator: np.random.Generator
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], otdd.labels.Labels]:
    """Two sides whose labels are of another kind, and how they are compared."""
    x, y = generator.normal(size=(22, 3)), generator.normal(size=(27, 3)) + 0.4
    if kind == "numbers":
        return (x, 5 * x[:, :1]), (y, 4 * y[:, :1]), "continuous"
    if kind == "sets":
        tags = [generator.random((len(each), 4)) < 0.4 for each in (x, y)]
        for each in tags:
            each[:, 0] |= ~each.any(1)
        return (x, tags[0]), (y, tags[1]), "gaussian"
    tree = {"a": "root", "b": "root", "c": "b"}
    return (
        (x, np.array(list("abc"))[np.arange(22) % 3]),
        (y, ["c", "b", "a"] * 9),
        otdd.labels.Tree(tree),
    )


@pytest.mark.parametrize("kind", ["sets", "numbers", "tree"])
def test_labels_of_other_kinds_cost_what_they_do_in_a_distance(kind):
    one, other, labels = labelled_otherwise(kind, np.random.default_rng(20))
    report = otdd.shift_test(one, other, labels=labels, permutations=39, seed=1)
    settings, table = {"labels": labels}, None
    if kind == "sets":
        both = np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1]))
        full = class_distances([both]).full
        table = ClassDistances(full, full, full)
    if kind == "numbers":
        scale = float(np.concatenate((one[1], other[1])).std())
        settings = {"labels": otdd.labels.Continuous((scale,))}
    exact = otdd.dataset_distance(
        one,
        other,
        epsilon=report.epsilon,
        class_distances=table,
        compute=otdd.ComputeOptions("cpu", precision="double"),
        solver=otdd.Converged(tolerance=1e-8),
        **settings,
    )
    assert report.statistic == pytest.approx(exact.value, rel=1e-5)
    alone = "Classes are not tested by themselves, as that takes one label a row." in str(report)
    assert alone == (kind != "tree")
    assert bool(report.parts.classes) == (report.parts.label_p_value is not None) == (not alone)
    assert report.parts.reference_rows.isfinite().all()
    assert otdd.shift_test(one, other, labels="none", permutations=19, parts=False).p_value > 0


def test_sets_of_one_label_each_are_classes():
    generator = np.random.default_rng(21)
    x, y = generator.normal(size=(12, 2)), generator.normal(size=(15, 2))
    kinds, others = np.arange(12) % 3, np.arange(15) % 3
    hot = (x, np.eye(3, dtype=int)[kinds]), (y, np.eye(3, dtype=int)[others])
    found = [otdd.shift_test(*pair, permutations=19) for pair in (hot, ((x, kinds), (y, others)))]
    assert found[0].statistic == found[1].statistic
    assert found[0].parts.to_dict() == found[1].parts.to_dict()


def test_a_given_table_between_the_classes_of_both_sides_is_fixed():
    generator = np.random.default_rng(22)
    one, other = side(generator, 20), side(generator, 24, shift=0.2)
    measured = otdd.shift_test(one, other, permutations=39)
    rows = PooledRows.of(one, other, Gaussian(), None)
    table = class_distances([rows.samples]).full
    given = otdd.labels.Given(ClassDistances(table, table, table))
    fixed = otdd.shift_test(one, other, labels=given, permutations=39)
    assert fixed.statistic == pytest.approx(measured.statistic, rel=1e-9)
    assert (fixed.p_value, fixed.labels) == (measured.p_value, "given")
    for parts, words in (
        ((table, 2 * table, table), "must not know the sides"),
        ((table[:2, :2],) * 3, "are about 2 source classes"),
    ):
        with pytest.raises(InputError, match=words):
            otdd.shift_test(one, other, labels=otdd.labels.Given(ClassDistances(*parts)))


@pytest.mark.parametrize("relative", [0.01, 0.1, 3.0])
def test_bounds_hold_for_every_permutation_and_wherever_a_solve_stops(relative):
    generator = np.random.default_rng(1)
    rows, pooled = pool(
        side(generator, 9, weights=True), side(generator, 14, weights=True), relative
    )
    a, b = sides_of(rows, 6)
    for until in (Until(), Until(width=math.inf), Until(threshold=0.0)):
        found = pooled.statistics(a, b, until)
        for k in range(a.shape[1]):
            x, y = a[:, k] > 0, b[:, k] > 0
            cost = pooled.cost
            exact = float(
                sinkhorn_divergence(
                    [cost[x][:, y], cost[x][:, x], cost[y][:, y]],
                    a[x, k],
                    b[y, k],
                    pooled.epsilon,
                )
            )
            assert float(found.lower[k]) <= exact <= float(found.upper[k]), (until, k)


def test_hits_that_bounds_decide_are_those_of_converged_values():
    generator = np.random.default_rng(2)
    for relative in (0.02, 0.1):
        rows, pooled = pool(side(generator, 20), side(generator, 26, shift=0.1), relative)
        a, b = sides_of(rows, 80)
        converged = pooled.statistics(a, b)
        threshold = float(converged.lower[0])
        early = pooled.statistics(a[:, 1:], b[:, 1:], Until(threshold=threshold))
        expected = converged.upper[1:] >= threshold
        assert 0 < int(expected.sum()) < len(expected)
        assert torch.equal(early.upper >= threshold, expected)
        # Not all of them were solved to the end.
        assert (early.upper - early.lower > 2 * (converged.upper - converged.lower)[1:]).any()
        test = permutation_test(pooled, rows, 80, 0)
        assert test.hits == int(expected.sum())
        assert test.p_value == (1 + test.hits) / 81


def test_an_early_end_counts_in_the_order_drawn():
    generator = np.random.default_rng(3)
    rows, pooled = pool(side(generator, 12), side(generator, 15))
    a, b = sides_of(rows, 99)
    converged = pooled.statistics(a, b)
    hits = (converged.upper[1:] >= converged.lower[0]).cumsum(0)
    for h in (1, 4, 10, 99):
        found = permutation_test(pooled, rows, 99, 0, stop_after=h)
        if int(hits[-1]) < h:
            assert found.p_value == (1 + int(hits[-1])) / 100
            assert len(found.null) == 99
            continue
        last = int((hits == h).nonzero()[0]) + 1
        assert (found.p_value, found.hits, len(found.null)) == (h / last, h, last)


def test_what_bounds_do_not_decide_is_a_hit(monkeypatch):
    generator = np.random.default_rng(18)
    rows, pooled = pool(side(generator, 6), side(generator, 6))
    bounds = iter([(0.9, 1.1), (0.8, 0.95)])

    def wide(_, a, *others):
        ends = [torch.full((a.shape[1],), end) for end in next(bounds)]
        return pooled_module.Statistics(ends[0], *ends)

    monkeypatch.setattr(PooledCost, "statistics", wide)
    assert permutation_test(pooled, rows, 19, 0).hits == 19


def test_draws_depend_on_seed_and_place_alone_and_keep_sides_and_groups():
    generator = np.random.default_rng(4)
    groups = [[0, 0, 1, 2, 2, 2, 3, 4], ["a", "b", "b", "c", "c", "d"]]
    one, other = side(generator, 8), side(generator, 6)
    rows = PooledRows.of(one, other, NoLabels(), groups)
    assert rows.sizes == (5, 4)
    whole = next(draws(rows, 20, 7, 20))
    assert np.array_equal(whole, np.hstack(list(draws(rows, 20, 7, 6))))
    assert not np.array_equal(whole, next(draws(rows, 20, 8, 20)))
    assert whole.sum(0).tolist() == [5] * 20
    for ours, masses in zip((whole, ~whole), rows.sides(whole, CPU), strict=True):
        assert torch.equal(masses > 0, torch.from_numpy(ours[rows.unit]))


def test_groups_make_a_shift_of_few_groups_insignificant():
    generator = np.random.default_rng(5)
    centres = 3 * generator.normal(size=(6, 2))
    own = np.repeat(np.arange(6), 10)
    x = centres[own] + 0.1 * generator.normal(size=(60, 2))
    pair = x[:30], x[30:]
    alone = otdd.shift_test(*pair, labels="none", permutations=99, parts=False)
    assert alone.p_value <= 0.05
    with pytest.warns(
        DataNotice, match=r"3 and 3 groups can be exchanged in so few ways that a share of 0\.1"
    ):
        grouped = otdd.shift_test(
            *pair, labels="none", permutations=99, parts=False, groups=[own[:30], own[30:]]
        )
    assert grouped.p_value > 0.05
    assert grouped.groups == (3, 3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("limit", "value"), [("MOST_LOG", -1e9), ("MOST_STEPS", 6)])
def test_scalings_out_of_range_and_slow_problems_are_solved_alone(monkeypatch, limit, value):
    generator = np.random.default_rng(6)
    rows, pooled = pool(side(generator, 8), side(generator, 9))
    a, b = sides_of(rows, 3)
    expected, parts = pooled.statistics(a, b), describe(pooled, rows)
    monkeypatch.setattr(pooled_module, limit, value)
    alone = pooled.statistics(a, b)
    assert float((alone.upper - alone.lower - 1e-3 * alone.lower).max()) <= 0
    assert alone.value.tolist() == pytest.approx(expected.value.tolist(), rel=1e-4)
    assert bool(((alone.lower <= expected.upper) & (expected.lower <= alone.upper)).all())
    for found, of_parts in zip(describe(pooled, rows), parts, strict=True):
        assert torch.allclose(found, of_parts, rtol=1e-3, atol=1e-3)
    # An outlier at a tiny epsilon needs it.
    x = np.concatenate((generator.normal(size=(15, 1)), [[30.0]]))
    report = otdd.shift_test(x[:8], x[8:], labels="none", permutations=19, epsilon=0.5, parts=False)
    assert all(map(math.isfinite, report.bounds))


@pytest.mark.parametrize(("most", "looks"), [(18, 3), (26, 4)])
def test_the_last_step_is_certified(monkeypatch, most, looks):
    """Looks are after 6, 12, 18, 27, ... steps, and at the end: no step is in vain."""
    generator = np.random.default_rng(6)
    rows, pooled = pool(side(generator, 8), side(generator, 9))
    a, b = (masses.double() for masses in sides_of(rows, 3))
    monkeypatch.setattr(pooled_module, "MOST_STEPS", most)
    taken, certified = [], pooled._certified

    def counted(kernel, *given):
        taken.append(kernel is pooled._cross)
        return certified(kernel, *given)

    monkeypatch.setattr(pooled, "_certified", counted)
    with contextlib.suppress(Exception):
        pooled.statistics(a, b, pooled_module.Until(width=0.0))
    assert sum(taken) == looks


def test_a_p_value_that_is_the_level_up_to_rounding_has_an_interval():
    """With windows it may be; the report then says shifted, and so does the effect."""
    generator = np.random.default_rng(10)
    x, y = generator.normal(size=(60, 2)), generator.normal(size=(60, 2)) + 3
    rows, pooled = pool(*(LabeledSamples.from_arrays(z, np.zeros(60, dtype=int)) for z in (x, y)))
    for p_value, shifted in ((0.05 * (1 + 1e-14), True), (0.05 * (1 + 1e-9), False)):
        test = PermutationTest(p_value, 1.0, (1.0, 1.0), torch.zeros(19), 0)
        found = measure_effect(pooled, rows, test, alpha=0.05, seed=0)
        assert rejects(p_value, 0.05) is shifted
        assert (found.lower is not None) is shifted


def test_rows_that_are_all_equal_have_no_shift():
    report = otdd.shift_test(np.ones((4, 2)), np.ones((5, 2)), labels="none", permutations=19)
    assert report.p_value == 1.0
    assert report.effect.value == pytest.approx(0.0, abs=1e-12)


def test_classes_keep_the_order_of_the_reference(recwarn):
    x = np.arange(36.0).reshape(18, 2)
    report = otdd.shift_test((x[:11], np.arange(11)), (x, np.arange(18) % 13), permutations=19)
    assert [each.name for each in report.parts.classes] == [str(k) for k in range(13)]
    assert not recwarn.list


def test_label_shift_is_pearsons_chi_square():
    generator = np.random.default_rng(7)
    one, other = side(generator, 30), side(generator, 41)
    rows = PooledRows.of(one, other, Gaussian(), None)
    table = np.stack([each.class_counts.numpy() for each in (one, other)])
    expected = chi2_contingency(table, correction=False).statistic
    p_value, statistic = label_test(rows, 199, 0)
    assert statistic == pytest.approx(expected, rel=1e-9)
    kinds, null = rows.labels.numpy(), []
    for ours in next(draws(rows, 199, 0, 199)).T:
        counts = [np.bincount(kinds[rows_of], minlength=3) for rows_of in (ours, ~ours)]
        null.append(chi2_contingency(np.stack(counts), correction=False).statistic)
    assert p_value == (1 + int((np.array(null) >= expected - 1e-9).sum())) / 200


def test_parts_name_the_class_that_shifts_and_those_that_are_too_small():
    generator = np.random.default_rng(8)
    sides = []
    for moved in (0.0, 2.0):
        labels = np.repeat(["a", "b", "c", "few", "only"], [25, 25, 25, 1, 3 if moved == 0 else 0])
        x = generator.normal(size=(len(labels), 3))
        x[labels == "b"] += moved
        sides.append((x, labels))
    report = otdd.shift_test(*sides, permutations=39, seed=1)
    assert report.parts is not None
    found = {each.name: each for each in report.parts.classes}
    assert report.parts.untestable == ("few", "only")
    # Raised to V / alpha.
    assert report.parts.permutations == 60
    assert found["b"].adjusted == pytest.approx(3 / 61)
    assert min(found["a"].adjusted, found["c"].adjusted) > 0.05
    assert sum(each.share for each in found.values()) == pytest.approx(1, abs=1e-6)
    assert found["b"].share > 0.5
    words = str(report)
    assert "Features differ within b (p = 0.049)" in words
    assert "Too few rows on a side to test by themselves: few, only." in words
    content = report.to_dict()
    assert content["parts"]["untestable"] == ["few", "only"]
    assert len(report.plot().axes) == 2


def test_families_are_chosen_by_counts_and_adjusted_after_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert family_of([1.0, 0.3, 1.0], 0.05) == []
    assert family_of([0.04, 0.3], 0.05) == [0]
    # Two of three: the third could reach 0.05, but not 0.05 / 2.
    assert family_of([1e-6, 1e-5, 0.04], 0.05) == [0, 1]
    assert family_of([1e-6] * 4, 0.05) == [0, 1, 2, 3]


def test_contributions_are_those_of_a_distance():
    generator = np.random.default_rng(9)
    one, other = side(generator, 12, weights=True), side(generator, 10, weights=True)
    rows, pooled = pool(one, other, metric=NoLabels())
    _, found = describe(pooled, rows)
    settings = {
        "epsilon": pooled.epsilon,
        "labels": "none",
        "compute": otdd.ComputeOptions("cpu", precision="double"),
        "solver": otdd.Converged(tolerance=1e-8),
    }
    for pair, part in (((one, other), slice(12)), ((other, one), slice(12, None))):
        expected = otdd.dataset_distance(*pair, **settings).contributions().values
        assert torch.allclose(found[part], expected, rtol=1e-3, atol=1e-3)


def test_rows_without_weight_have_no_part_and_keep_the_places_of_others():
    generator = np.random.default_rng(16)
    one, other = side(generator, 9, weights=True), side(generator, 8, weights=True)
    weights = one.weights * one.mass
    weights[4] = 0.0
    one = LabeledSamples(one.features, one.labels, one.class_names, weights)
    report = otdd.shift_test(one, other, permutations=19)
    assert report.sizes == (8, 8)
    assert report.parts.reference_rows.isnan().nonzero().tolist() == [[4]]
    assert report.parts.sample_rows.isfinite().all()
    without = LabeledSamples(
        *(part[weights > 0] for part in (one.features, one.labels)),
        one.class_names,
        weights[weights > 0],
    )
    kept = otdd.shift_test(without, other, permutations=19)
    assert report.statistic == pytest.approx(kept.statistic, rel=1e-6)
    assert report.p_value == kept.p_value


def test_effects_are_sizes_with_intervals_away_from_zero_alone():
    generator = np.random.default_rng(10)
    x, y = generator.normal(size=(60, 2)), generator.normal(size=(60, 2))
    none = otdd.shift_test(x, y, labels="none", permutations=99, min_effect=0.01, parts=False)
    assert not none.shifted
    assert none.effect.lower is none.effect.upper is None
    assert none.exceeds is False
    assert abs(none.effect.value) < 0.02
    far = otdd.shift_test(x, y + 3, labels="none", permutations=99, min_effect=0.1, parts=False)
    assert far.shifted
    assert far.exceeds is True
    assert far.effect.lower < far.effect.value < far.effect.upper
    # The squared shift of the mean, at weight 1/2, over the mean cost of the pooled rows.
    assert far.effect.value == pytest.approx(9 / far.mean_cost, rel=0.15)
    assert far.effect.lower <= 9 / far.mean_cost * 1.1
    assert "is not shown to exceed min_effect=0.01" in str(none)
    assert "with enough rows any shift is significant" in str(far)
    assert otdd.shift_test(x, y, labels="none", permutations=19).exceeds is None


def test_effects_are_not_of_other_spreads_or_numbers_of_rows():
    generator = np.random.default_rng(17)
    x, y = generator.normal(size=(300, 10)), generator.normal(size=(50, 10))
    settings = {"labels": "none", "permutations": 19, "parts": False}
    same, wide = (otdd.shift_test(x, z, **settings).effect for z in (y, 1.5**0.5 * y))
    assert abs(same.value) < 0.03
    # 0.022 between the laws, by the closed form for normal ones; T less its null mean is 0.1.
    assert 0.0 < wide.value < 0.05
    few = otdd.shift_test(x[:19], x[19:38] + 9, **settings)
    assert few.shifted
    assert few.effect.lower is None


def test_classes_are_united_and_the_order_of_sides_does_not_matter():
    generator = np.random.default_rng(11)
    x, y = generator.normal(size=(12, 2)), generator.normal(size=(12, 2))
    one = x, ["a", "b", "c"] * 4
    other = y, ["c", "d", "b"] * 4
    first = otdd.shift_test(one, other, permutations=19)
    second = otdd.shift_test(other, one, permutations=19)
    assert first.statistic == pytest.approx(second.statistic, rel=1e-6)
    assert first.epsilon == pytest.approx(second.epsilon, rel=1e-12)
    assert [each.name for each in first.parts.classes] == ["a", "b", "c", "d"]


def test_windows_spend_the_level_and_equal_a_detector():
    generator = np.random.default_rng(12)
    reference = generator.normal(size=(30, 2))
    stream = generator.normal(size=(50, 2))
    stream[40:] += 4
    settings = {"labels": "none", "permutations": 19, "parts": False}
    with pytest.warns(DataNotice, match="the last 10 rows do not fill a window of 20"):
        first = otdd.shift_windows(reference, stream, window=20, **settings)
    reports = otdd.shift_windows(reference, stream, window=10, **settings)
    assert len(first) == 2
    assert [each.alpha for each in reports] == [0.05 / (t * (t + 1)) for t in range(1, 6)]
    assert [each.requested for each in reports] == [39, 119, 239, 399, 599]
    assert [each.shifted for each in reports] == [False] * 4 + [True]
    detector = ShiftDetector(reference, **settings)
    for place, expected in enumerate(reports):
        found = detector.score(stream[10 * place : 10 * place + 10])
        assert (found.p_value, found.alpha) == (expected.p_value, expected.alpha)
    detector.reset()
    assert detector.score(stream[:10]).alpha == 0.025
    for wrong in ({"alpha": 0.0}, {"alpha": 2}, {"permutations": 5}, {"permutations": 30.5}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must"):
            ShiftDetector(reference, **wrong)
    with pytest.raises(InputError, match="window 80 is tested at level"):
        spent(0.05, 80, 19)


def test_windows_are_all_checked_before_the_first_is_tested():
    x, y = np.arange(48.0).reshape(24, 2), np.arange(144.0).reshape(72, 2)
    kinds, done = [0, 1] * 12, []
    settings = {"window": 24, "permutations": 19, "progress": lambda *k: done.append(k)}
    with pytest.raises(InputError, match="window 3: reference and sample share no class"):
        otdd.shift_windows((x, kinds), (y, [0, 1] * 24 + [2] * 24), **settings)
    with pytest.raises(InputError, match=r"window 3: tests of 2 classes .* parts=false"):
        otdd.shift_windows((x, kinds), (y, [0, 1] * 36), **settings, alpha=2e-4)
    with pytest.raises(InputError, match="groups of sample must be 72, one a row, got 99"):
        otdd.shift_windows(x, y, labels="none", groups=[range(24), range(99)], **settings)
    assert not done


REFUSALS = {
    "one row": (
        lambda x, y: (x[:1], y),
        {},
        "at least 2 rows of positive weight on each side, and ref",
    ),
    "dimension": (lambda x, y: (x, y[:, :1]), {}, "has 2 features and sample has 1"),
    "no labels": (lambda x, y: (x, y), {"labels": "gaussian"}, "reference has no labels"),
    "numbers": (lambda x, y: ((x, x[:, 0]), (y, y[:, 0])), {"labels": "gaussian"}, "has numbers"),
    "no shared class": (
        lambda x, y: ((x, ["a"] * 6), (y, ["b"] * 6)),
        {"labels": "gaussian"},
        "share no class: a against b; .*labels=none",
    ),
    "permutations": (lambda x, y: (x, y), {"permutations": 18}, r"must lie in \[19, 100000\]"),
    "many": (lambda x, y: (x, y), {"permutations": 200_000}, "more add nothing"),
    "one group": (
        lambda x, y: (x, y),
        {"groups": [[0] * 6, [1, 2, 3, 4, 5, 6]]},
        "at least 2 groups on each side, and reference has 1",
    ),
    "shared group": (
        lambda x, y: (x, y),
        {"groups": [[0, 0, 1, 1, 2, 2], [2.0, 2.0, 3.0, 3.0, 4.0, 4.0]]},
        "group 2 is on both sides",
    ),
    "shared date": (
        lambda x, y: (x, y),
        {"groups": [np.array(["2026-05-01"] * 6, t) for t in ("M8[D]", "M8[ns]")]},
        "is on both sides",
    ),
    "shared number": (
        lambda x, y: (x, y),
        {"groups": [np.arange(6) // 2, np.arange(6) // 2 + 2.0]},
        "group 2 is on both sides",
    ),
    "missing group": (
        lambda x, y: (x, y),
        {"groups": [[0, 0, 1, 1, 2, 2], [3, 3, np.nan, np.nan, 4, 4]]},
        "2 groups of sample are missing",
    ),
    "epsilon beside an outlier": (
        lambda x, y: (np.concatenate((x, [[1e6, 0.0]])), y),
        {"epsilon": 1.0},
        "epsilon=1 is too small beside the largest cost",
    ),
    "group sizes": (lambda x, y: (x, y), {"groups": [[1, 2], [3, 4]]}, "groups of reference must"),
    "both epsilons": (lambda x, y: (x, y), {"epsilon": 1.0, "epsilon_relative": 0.1}, "epsilon"),
    "weights": (
        lambda x, y: (LabeledSamples(torch.from_numpy(x), None, (), torch.ones(6)), y),
        {},
        "one side has weights and the other has none",
    ),
    "alpha": (lambda x, y: (x, y), {"alpha": 0.0}, "alpha must lie in"),
    "level": (
        lambda x, y: (x, y),
        {"alpha": 0.001, "permutations": 99},
        "allow no p-value as small as 0.001; set permutations=999",
    ),
}


def test_bad_input_is_refused_in_a_sentence():
    generator = np.random.default_rng(13)
    x, y = generator.normal(size=(6, 2)), generator.normal(size=(6, 2))
    for name, (sides, settings, words) in REFUSALS.items():
        with naming(name), pytest.raises(InputError, match=words):
            otdd.shift_test(*sides(x, y), **{"labels": "none", "permutations": 19, **settings})
    labels = [str(k % 3) for k in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNotice)
        assert otdd.shift_test((x, labels), (y, labels), permutations=19).parts.permutations == 0


@pytest.mark.slow
def test_p_values_are_uniform_under_the_null():
    """300 simulations; a share at 0.05 above 0.0927 has probability 0.001 for a valid test."""
    found = []
    for seed in range(300):
        generator = np.random.default_rng((seed, 1))
        x, y = generator.normal(size=(12, 2)), generator.normal(size=(20, 2))
        report = otdd.shift_test(
            x, y, labels="none", permutations=19, parts=False, seed=seed, compute="cpu"
        )
        found.append(report.p_value)
    shares = [np.mean(np.array(found) <= level) for level in (0.05, 0.5)]
    assert 0.01 <= shares[0] <= 0.0927
    assert abs(shares[1] - 0.5) <= 0.1


@pytest.mark.gpu
def test_a_gpu_counts_the_same_hits():
    generator = np.random.default_rng(14)
    one, other = side(generator, 60), side(generator, 70, shift=0.2)
    first, second = (
        otdd.shift_test(one, other, permutations=99, compute=device) for device in ("cpu", "cuda")
    )
    assert first.hits == second.hits
    assert first.statistic == pytest.approx(second.statistic, rel=1e-6)


def test_dense_costs_are_those_of_the_library():
    generator = np.random.default_rng(15)
    one, other = side(generator, 7), side(generator, 8)
    rows, pooled = pool(one, other, lambda_x=0.3, lambda_y=0.6)
    x, labels = rows.samples.features, rows.samples.labels
    table = class_distances([rows.samples]).full
    expected = dense_cost(x, x, 0.3, 0.6 * table, labels, labels)
    assert torch.allclose(pooled.cost, expected, rtol=1e-12, atol=1e-12)
