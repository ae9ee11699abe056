"""`labels=f`: a plain function of the points of two classes, whatever compares datasets by it."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError, UserCodeError
from otdd_flash.labels.pairs import chunk_size


def dense(*datasets):
    """(V, V) squared distances of medians, of all classes of some datasets, in float64."""
    medians = [
        np.median(one.features[one.labels == c].double().numpy(), axis=0)
        for one in datasets
        for c in range(one.class_total)
    ]
    return torch.tensor([[float(((p - q) ** 2).sum()) for q in medians] for p in medians]).double()


class Medians:
    """A function that counts its calls, and writes to what it is given."""

    def __init__(self, more=0.0):
        self.sizes, self.more = [], more

    def __call__(self, x, y):
        self.sizes.append({len(x), len(y)})
        value = float(((np.median(x, axis=0) - np.median(y, axis=0)) ** 2).sum())
        x.zero_()
        y.fill_(torch.nan)
        return value + self.more


@pytest.fixture
def sides(blobs):
    """Three datasets whose classes all have different sizes."""
    return (
        blobs((5, 6), 3, name="left"),
        blobs((4, 7, 9), 3, seed=1, name="right"),
        blobs((8, 3), 3, seed=2, name="third"),
    )


def test_a_function_is_called_once_for_each_pair_of_classes(sides, tmp_path):
    sizes = [[5, 6], [4, 7, 9], [8, 3]]
    for count, compared in ((2, otdd.dataset_distance), (3, None)):
        function = Medians()
        for _ in range(2):
            if compared is None:
                options = {"labels": function, "epsilon": 20.0, "cache_dir": tmp_path}
                result = otdd.pairwise_distances(sides, **options)
            else:
                result = compared(*sides[:2], labels=function, epsilon=20.0, cache_dir=tmp_path)
                assert result.to_dict()["labels"].endswith("test_pair_functions.Medians")
        expected = [set(pair) for pair in combinations(chain(*sizes[:count]), 2)]
        # Nothing is kept: as often the second time.
        assert sorted(map(sorted, function.sizes)) == sorted(map(sorted, 2 * expected))
        torch.testing.assert_close(result.class_distances.full, dense(*sides[:count]))
    assert not [*tmp_path.iterdir()]
    # Classes of the same points are at distance 0.
    left = sides[0]
    result = otdd.dataset_distance(left, left, labels=lambda x, y: torch.tensor(3), epsilon=1.0)
    assert result.class_distances.full.tolist() == 2 * [[0, 3, 0, 3], [3, 0, 3, 0]]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x, y: -0.5, "must not be negative, got -0.5; return a squared distance, max(value"),
        (lambda x, y: np.float32("nan"), "must be finite, got nan; return a number"),
        (lambda x, y: torch.tensor(torch.inf), "must be finite, got inf"),
        (lambda x, y: None, "must be one number, the squared distance of both, got None"),
        (lambda x, y: True, "must be one number, the squared distance of both, got True"),
        (lambda x, y: 1j, "must be one number, the squared distance of both, got 1j"),
        (lambda x, y: x.mean(0), "must be one number, the squared distance of both, got Tensor of"),
        (lambda x, y: {}["no such thing"], "raised KeyError: 'no such thing'"),
        (lambda x: 0.0, "raised TypeError: "),
        (otdd.labels.Gaussian, "is the type Gaussian and no object of it; write Gaussian()"),
        (3, "or a function of the points of two classes, got 3"),
    ],
)
def test_what_is_no_squared_distance_is_refused_with_both_classes(sides, function, error):
    with pytest.raises(InputError) as refused:
        otdd.class_distances(sides[:1], function)
    assert error in str(refused.value)
    called = callable(function) and not isinstance(function, type)
    assert ("classes '1' of left and '0' of left" in str(refused.value)) == called
    assert isinstance(refused.value, UserCodeError) == ("raised" in error)


def test_weights_are_refused_where_they_would_count(blobs, sides):
    function = Medians()
    weighted = blobs((5, 6), 3, weights=np.arange(1.0, 12.0), name="weighted")
    tasks = {"one": weighted, "other": sides[1]}
    for call in (
        lambda: otdd.dataset_distance(weighted, sides[1], labels=function),
        lambda: otdd.pairwise_distances([weighted, sides[1]], labels=function),
        lambda: otdd.gradient_flow(weighted, sides[1], labels=function),
        lambda: otdd.Study(tasks, ["otdd"], None, labels=function).run("never made"),
    ):
        with pytest.raises(InputError, match=r"have different weights; leave the weights out"):
            call()
    assert not function.sizes
    even = blobs((5, 6), 3, weights=np.repeat(2.0, 11))
    torch.testing.assert_close(otdd.class_distances([even], function).full, dense(even))


@pytest.mark.slow
def test_a_flow_calls_it_again_where_its_particles_are(sides, tmp_path):
    source, target, _ = sides
    options = {"labels": Medians(), "epsilon": 1.0}
    flow = otdd.Flow(2, checkpoints=otdd.Checkpoints(tmp_path))
    flown = otdd.gradient_flow(source, target, flow, **options)
    assert not torch.allclose(flown.samples.features, source.features, atol=0.01)
    torch.testing.assert_close(flown.class_distances.full, dense(flown.samples, target))
    again = otdd.Flow(3, checkpoints=otdd.Checkpoints(tmp_path, resume=True))
    with pytest.raises(InputError, match="labels"):
        otdd.gradient_flow(source, target, again, **options | {"labels": lambda x, y: 1.0})
    assert otdd.gradient_flow(source, target, again, **options).history[-1].step == 3
    with pytest.raises(InputError, match=r"flow.mode=attached works with labels=gaussian and"):
        otdd.gradient_flow(source, target, otdd.Flow(1, "attached"), **options)


@pytest.mark.slow
def test_a_study_goes_on_with_the_same_function_alone(sides, tmp_path):
    tasks = dict(zip("abc", sides, strict=True))

    def study(function):
        return otdd.Study(tasks, ["otdd"], None, labels=function, epsilon=1.0, compute="cpu")

    result = study(Medians()).run(tmp_path)
    expected = otdd.pairwise_distances(
        sides, class_distances=otdd.class_distances(sides, Medians()), epsilon=1.0, compute="cpu"
    )
    found = {(row.source, row.target): row.value for row in result.pairs()}
    for (i, a), (j, b) in combinations(enumerate("abc"), 2):
        assert found[a, b] == pytest.approx(float(expected.values[i, j]), rel=1e-6)
    with pytest.raises(InputError, match=r"other settings: labels\.probe differ"):
        study(Medians(1.0)).run(tmp_path, resume=True)
    assert study(Medians()).run(tmp_path, resume=True).complete


def test_a_chunk_of_pairs_fits_a_core_and_keeps_a_card_busy():
    cpu, card = torch.device("cpu"), torch.device("cuda")
    for entries, device, size in (
        (0, cpu, 4096),
        (2**10, cpu, 2**10),
        (2**20, cpu, 1),
        (2**21, cpu, 1),
        (2**21, card, 32),
        (2**10, card, 4096),
    ):
        assert chunk_size(entries, device) == size


def test_rows_with_several_labels_are_refused():
    sides = [(np.eye(3), [["a"], ["a", "b"], ["b"]]), (np.eye(3)[:2], [["a"], ["b"]])]
    with pytest.raises(InputError, match="rows with several labels count as a part of each, as of"):
        otdd.dataset_distance(*sides, labels=lambda x, y: 1.0)
