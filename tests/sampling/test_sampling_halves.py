"""The noise floor: disjoint halves of each dataset, and both datasets at the same size."""

import numpy as np
import pytest
import torch
from sampling_cases import mixture, numbered, numbers

from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.labels import ClassDistances
from otdd_flash.otdd import dataset_distance
from otdd_flash.sampling import comparison, noise_floor
from otdd_flash.solver.schedules.converged import Converged


@pytest.fixture
def pair():
    generator = np.random.default_rng(0)
    return mixture(61, generator), mixture(84, generator, 3.0)


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


@pytest.mark.parametrize("sizes", [((21, 20), (60, 50)), ((60, 50), (21, 20))])
def test_halves_are_disjoint_parts_of_one_dataset_and_all_of_one_size(compared, sizes):
    source, target = (numbered(*counts) for counts in sizes)
    floor = noise_floor(source, target, labels="means", epsilon=100.0)
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
    floor = noise_floor(*pair, epsilon=0.1)
    assert floor.between.lower > 5 * max(floor.source.upper, floor.target.upper)
    generator = np.random.default_rng(1)
    like = noise_floor(mixture(100, generator), mixture(100, generator), epsilon=0.1)
    assert like.between.value < 3 * max(like.source.value, like.target.value)


def test_a_given_table_holds_within_each_dataset(pair, compared):
    blocks = [torch.tensor([[0.0, w], [w, 0.0]]) for w in (1.0, 2.0, 3.0)]
    noise_floor(*pair, class_distances=ClassDistances(*blocks), epsilon=0.1)
    for (_, _, settings, _), block in zip(compared[:2], (blocks[0], blocks[2]), strict=True):
        assert torch.equal(settings["class_distances"].full, block.double().repeat(2, 2))
    assert torch.equal(compared[2][2]["class_distances"].xy, blocks[1].double())


@pytest.mark.slow
def test_a_seed_decides_the_split(pair):
    first, again, other = (
        noise_floor(*pair, seed=seed, labels="means", epsilon=0.1) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.source != other.source


def test_labels_that_do_not_count_do_not_limit_the_halves(compared):
    assert noise_floor(numbered(8, 3), numbered(6, 6), labels="none", epsilon=10.0).size == 5


@pytest.mark.slow
def test_why_solves_stopped_early_is_told_once(pair):
    early = Converged(tolerance=1e-4, max_iterations=1)
    rounded = r"rounding allows in 3 of 3 .* Raise solver\.bound_width or eps"
    for solver, message in ((early, "3 of 3"), (Converged(bound_width=1e-9), rounded)):
        with pytest.warns(NotConvergedWarning, match=message) as told:
            noise_floor(*pair, epsilon=1.0, solver=solver)
        assert len(told) == 1


def test_what_has_no_halves_is_refused(pair):
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
    floor = noise_floor(*small, labels="means", epsilon=10.0, min_class_size=4)
    assert floor.size == 4
