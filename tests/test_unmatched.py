"""What relaxed transport leaves of classes and rows, in Python and from the command line."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.unmatched import Unmatched, UnmatchedClass


def clusters(*places: float, name: str = "samples") -> otdd.LabeledSamples:
    """Ten points of a class around each of some places on a line."""
    draw = torch.Generator().manual_seed(len(places))
    rows = torch.cat([place + torch.randn(10, 1, generator=draw) / 10 for place in places])
    labels = torch.arange(len(places)).repeat_interleave(10)
    names = tuple(f"at {place:g}" for place in places)
    return otdd.LabeledSamples(rows, labels, names, name=name)


def left(unbalanced: float, labels: str = "none") -> Unmatched:
    sides = clusters(0.0, 10.0, 20.0), clusters(0.0, 10.0)
    found = otdd.dataset_distance(*sides, epsilon=0.1, unbalanced=unbalanced, labels=labels)
    return found.unmatched()


def test_classes_without_a_counterpart_stand_out_from_their_self_terms() -> None:
    for labels in ("none", "gaussian"):
        found = left(2.0, labels)
        by_name = {(each.side, each.name): each for each in found.classes}
        assert by_name["source", "at 20"].unmatched > 0.99
        for each in found.classes:
            assert each.own is not None
            assert each.own < 0.1
            if each.name != "at 20":
                assert each.unmatched < 0.25
    assert found.source_rows[20:].min() > 0.99
    assert found.source_rows.shape == (30,)


def test_shares_are_those_of_the_plan() -> None:
    sides = clusters(0.0, 1.0, 3.0), clusters(0.2, 1.5)
    found = otdd.dataset_distance(
        *sides, epsilon=0.1, unbalanced=0.7, labels="none", solver=otdd.Converged(1e-5)
    )
    unmatched, coupling = found.unmatched(), found.class_coupling()
    assert unmatched.moved == pytest.approx(float(coupling.sum()), rel=1e-5)
    for side, sums in (("source", coupling.sum(1)), ("target", coupling.sum(0))):
        rows = [each for each in unmatched.classes if each.side == side]
        for each, moved in zip(rows, sums.tolist(), strict=True):
            assert each.moved == pytest.approx(moved, rel=1e-4)
            assert each.unmatched == pytest.approx(max(0, 1 - moved / each.mass), abs=1e-4)
            assert each.surplus == pytest.approx(max(0, moved - each.mass), abs=1e-5)
    rows = found.apply_plan(torch.ones(20))
    torch.testing.assert_close(1 - rows.double() * 30, unmatched.source_rows, rtol=1e-3, atol=1e-4)


def test_one_exact_side_leaves_nothing() -> None:
    sides = clusters(0.0, 10.0), clusters(0.0, 3.0)
    found = otdd.dataset_distance(
        *sides, epsilon=0.1, unbalanced=[1.0, None], labels="none", debias=False
    ).unmatched()
    target = [each for each in found.classes if each.side == "target"]
    assert [each.unmatched for each in target] == pytest.approx([0, 0], abs=1e-12)
    assert {each.own for each in found.classes} == {None}


def test_a_surplus_has_its_own_column() -> None:
    """A small class that many rows of the other dataset are near gives more than it has."""
    few = otdd.LabeledSamples(torch.zeros(1, 1), torch.zeros(1), ("near",))
    source = otdd.LabeledSamples(
        torch.tensor([[0.0], [9.0]]),
        torch.tensor([0, 1]),
        ("near", "far"),
        torch.tensor([0.1, 0.9]),
    )
    found = otdd.dataset_distance(source, few, epsilon=0.1, unbalanced=2.0, labels="none")
    near, far, _ = found.unmatched().classes
    assert near.unmatched == 0
    assert near.surplus > 0.1
    assert far.unmatched > 0.9
    assert far.surplus == 0


def test_it_prints_and_becomes_a_table() -> None:
    found = left(2.0)
    lines = str(found).splitlines()
    assert lines[0].endswith("of the mass moves")
    assert lines[2].split()[:3] == ["source", "at", "20"]
    frame = found.to_frame()
    assert tuple(frame.columns) == UnmatchedClass._fields
    assert list(frame.name) == ["at 0", "at 10", "at 20", "at 0", "at 10"]


def test_exact_marginals_leave_nothing_to_ask_for() -> None:
    found = otdd.dataset_distance(clusters(0.0), clusters(1.0), labels="none")
    with pytest.raises(otdd.InputError, match="give unbalanced"):
        found.unmatched()


def test_pairs_of_datasets_are_those_of_single_distances() -> None:
    sides = [clusters(0.0, 1.0, name="a"), clusters(0.5, 3.0, name="b"), clusters(2.0, name="c")]
    found = otdd.pairwise_distances(sides, epsilon=0.1, unbalanced=0.5, labels="means")
    for i, j in ((0, 1), (0, 2), (1, 2)):
        one = otdd.dataset_distance(sides[i], sides[j], epsilon=0.1, unbalanced=0.5, labels="means")
        assert float(found.values[i, j]) == pytest.approx(one.value, rel=1e-9)
    assert found.details["unbalanced"] == [0.5, 0.5]
    assert "unbalanced=[0.5, 0.5], " in repr(found)


@pytest.mark.parametrize("mode", ["features", "attached", "joint"])
def test_a_flow_leaves_particles_without_a_counterpart_where_they_are(mode: str) -> None:
    source, target = clusters(0.0, 30.0), clusters(1.0, 1.5)
    stepping = otdd.Stepping(step_size=0.2)
    flow = otdd.Flow(mode=mode, steps=5, stepping=stepping, keep_moments=mode == "features")
    cost = otdd.GroundCost(lambda_y=0.0)
    given = {"epsilon": 0.1, "labels": "means", "cost": cost}
    balanced = otdd.gradient_flow(source, target, flow, **given)
    relaxed = otdd.gradient_flow(source, target, flow, unbalanced=1.0, **given)
    moved = [(each.samples.features - source.features).squeeze(1) for each in (balanced, relaxed)]
    assert moved[0][10:].max() < -1
    assert moved[1][10:].abs().max() < 0.3
    assert moved[1][:10].mean() > 0.3
    assert relaxed.settings["unbalanced"] == [1.0, 1.0]
    with pytest.raises(otdd.InputError, match=r"conditional plans|moves more"):
        relaxed.map("entropic")


def test_a_class_with_fewer_rows_on_the_other_side_is_not_said_to_have_no_counterpart() -> None:
    """Label shift: a class leaves most of its mass where the other side has it, but less of it."""
    draw = torch.Generator().manual_seed(0)
    cats, dogs = torch.randn(50, 1, generator=draw), torch.randn(50, 1, generator=draw) + 30

    def samples(first: int, second: int, *, weighted: bool = False) -> otdd.LabeledSamples:
        labels = torch.tensor([0] * first + [1] * second)
        weights = 1 / labels.bincount()[labels] if weighted else None
        rows = torch.cat((cats[:first], dogs[:second]))
        return otdd.LabeledSamples(rows, labels, ("cat", "dog"), weights=weights)

    settings = {"unbalanced_relative": 0.3, "labels": "none"}
    found = otdd.dataset_distance(samples(50, 5), samples(5, 50), **settings).unmatched()
    by_name = {(each.side, each.name): each for each in found.classes}
    assert by_name["source", "cat"].unmatched > 0.5
    assert by_name["target", "cat"].surplus > 0.1
    assert str(found).splitlines()[-1].endswith("no counterpart, or too few of them")
    # As the page says, masses that are equal on both sides leave what rows do not match.
    equal = samples(50, 5, weighted=True), samples(5, 50, weighted=True)
    for each in otdd.dataset_distance(*equal, **settings).unmatched().classes:
        assert each.own is not None
        assert each.unmatched < each.own + 0.1


def test_rows_are_those_of_the_result_without_dropped_classes() -> None:
    rows = torch.tensor([[0.0], [0.1], [50.0], [0.2], [51.0], [0.3]])
    labels = torch.tensor([1, 0, 2, 0, 2, 0])
    source = otdd.LabeledSamples(rows, labels, ("near", "alone", "far"))
    with pytest.warns(otdd.DataNotice):
        result = otdd.dataset_distance(
            source, clusters(0.0), unbalanced=1.0, epsilon=0.1, labels="means", min_class_size=2
        )
    shares = result.unmatched().source_rows
    assert result.source.features[shares > 0.9].squeeze(1).tolist() == [50.0, 51.0]


def test_long_names_are_cut_as_in_other_tables() -> None:
    each = UnmatchedClass("source", "x" * 300 + "\x1b", 1.0, 0.5, 0.5, None, 0.0)
    found = Unmatched(0.5, (each,), torch.zeros(1), torch.zeros(1))
    lines = str(found).splitlines()
    assert lines[0] == "0.5 of the mass moves"
    assert lines[2].split()[1] == "x" * 23 + "…"
