"""Class distances between more than two datasets: one table, cut, named, saved."""

from __future__ import annotations

import live_bytes
import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.labels import Given, Sinkhorn, measure_classes, metric_named
from otdd_flash.labels.many import JointClassDistances, class_distances
from otdd_flash.labels.pairs import all_pairs, symmetric_table
from otdd_flash.samples import LabeledSamples


@pytest.fixture
def datasets(blobs):
    return [
        blobs(sizes, 3, k, name=f"set {k}") for k, sizes in enumerate([(4, 5), (6,), (3, 4, 5)])
    ]


@pytest.mark.parametrize("labels", ["gaussian", Sinkhorn(epsilon=1.0)])
def test_saved_tables_load_again(datasets, labels, tmp_path):
    table = otdd.class_distances(datasets, labels)
    table.save(tmp_path / "table.w")
    loaded = JointClassDistances.load(tmp_path / "table.w")
    assert (loaded.datasets, loaded.class_names) == (table.datasets, table.class_names)
    assert loaded.offsets == (0, 2, 3, 6)
    assert torch.equal(loaded.full, table.full)
    assert (loaded.lower is None) == (labels == "gaussian")
    if loaded.lower is not None:
        assert torch.equal(loaded.lower, table.lower)
        assert torch.equal(loaded.upper, table.upper)
        assert torch.equal(
            loaded.between(2, 0).upper, table.between(0, 2).upper.roll((3, 3), (0, 1))
        )


def test_equal_classes_of_several_datasets_are_measured_once(datasets):
    one, two, _ = datasets
    heard: list[tuple[int, int]] = []
    table = class_distances([one, two, one, one], progress=lambda *event: heard.append(event))
    assert heard[-1] == (3, 3)
    assert torch.equal(table.between(0, 2).xy, table.between(0, 0).xx)
    assert float(table.between(0, 3).xy.diagonal().abs().max()) == 0


def test_shared_names_are_told_apart_by_place(datasets):
    one, two, _ = datasets
    assert class_distances([one, two, one]).datasets == ("set 0 (0)", "set 1", "set 0 (2)")


def test_small_classes_go_as_between_two_datasets(blobs):
    datasets = [blobs((4, 1), 3, name="left"), blobs((5,), 3, 1), blobs((1, 6), 3, 2)]
    with pytest.warns(DataNotice, match=r"one sample are points.*'1' of left, '0' of "):
        class_distances(datasets)
    with pytest.warns(DataNotice, match="fewer than 2"):
        table = class_distances(datasets, min_class_size=2)
    assert table.class_names == (("0",), ("0",), ("1",))


def test_unlabelled_data_are_one_class_without_distances(datasets):
    cells = LabeledSamples(torch.eye(3), None, (), name="cells")
    table = class_distances([cells, datasets[0]], "none")
    assert table.class_names == (("all",), ("0", "1"))
    assert not table.full.any()
    with pytest.raises(InputError, match="cells has no labels"):
        class_distances([cells, datasets[0]])


def test_a_table_is_taken_by_class_names(datasets):
    table = class_distances(datasets)
    some = [datasets[0].keep_classes([1]), datasets[1], datasets[2].keep_classes([2, 0])]
    part = table.named_for(some)
    assert part.class_names == (("1",), ("0",), ("2", "0"))
    rows = [1, 2, 5, 3]
    assert torch.equal(part.full, table.full[rows][:, rows])
    renamed = LabeledSamples(datasets[1].features, datasets[1].labels, ("owl",), name="zoo")
    with pytest.raises(InputError, match="no class owl of zoo; they have 0"):
        table.named_for([datasets[0], renamed, datasets[2]])
    with pytest.raises(InputError, match=r"about 3 datasets .*, but there are 2"):
        table.named_for(datasets[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *_: class_distances(None), "datasets must be a list, got None"),
        (lambda *_: class_distances([]), "holds 0 datasets, and at least 1"),
        (lambda *_: class_distances(["mnist"]), r"datasets\[0\] must be .* got 'mnist'"),
        (lambda *_: class_distances([np.eye(3)]), r"datasets\[0\] has no labels"),
        (lambda sets, _: class_distances(sets[0]), "got LabeledSamples"),
        (lambda sets, wide: class_distances([*sets, wide]), "set 0 has 3 features and wide has 5"),
        (lambda sets, _: class_distances(sets, "gauss"), "unknown labels.method 'gauss'"),
        (lambda sets, _: class_distances(sets, 7), "a name such as .*, or a function .* got 7"),
        (lambda sets, _: class_distances(sets, "given"), "labels=given needs a table"),
        (
            lambda sets, _: class_distances(sets, Given(class_distances(sets).between(0, 1))),
            "class_distances=",
        ),
        (lambda sets, _: class_distances(sets).between(0, 3), "no dataset 3; the table has 3"),
        (lambda sets, _: class_distances(sets).between(0, -1), "at least 0, got -1"),
    ],
)
def test_what_is_refused(datasets, blobs, call, message):
    with pytest.raises(InputError, match=message):
        call(datasets, blobs((4,), 5, name="wide"))


def test_unreadable_tables_are_input_errors(datasets, tmp_path):
    class_distances(datasets).between(0, 1).save(tmp_path / "two.npz")
    table = class_distances(datasets)
    content = {"full": table.full[:4], "offsets": table.offsets, "datasets": table.datasets}
    np.savez(tmp_path / "cut.npz", **content, class_names=[n for g in table.class_names for n in g])
    for name, message in {
        "none.npz": "no such file",
        "two.npz": r"no array full, offsets, datasets, class_names \(it holds: xx",
        "cut.npz": "do not count the same classes",
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            JointClassDistances.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gaussian", "sinkhorn", "exact", "means", "upper_bound"])
def test_a_gpu_measures_what_the_processor_does(method, blobs):
    pair = blobs((30, 50), 5), blobs((40, 70, 20), 5, 1, weights=np.arange(130) % 4)
    # Ten times above what float32 potentials on the card can settle to at these costs.
    metric = metric_named(method, {"epsilon": 1.0, "tolerance": 1e-4})
    expected = measure_classes(*pair, metric)
    got = measure_classes(*(side.to("cuda") for side in pair), metric)
    assert got.full.device.type == "cpu"
    torch.testing.assert_close(got.full, expected.full, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_table_takes_little_beside_itself():
    """Where it is made, there may be little room: it is twice as long as the list of pairs."""
    pairs, values = all_pairs(300), torch.rand(300 * 299 // 2, dtype=torch.float64)
    values.requires_grad_()
    with torch.no_grad():
        taken = live_bytes.peak(lambda: symmetric_table(values, pairs, 300), torch.device("cpu"))
    table = symmetric_table(values, pairs, 300)
    assert taken < 1.1 * table.nbytes
    assert torch.equal(table[pairs[:, 0], pairs[:, 1]], values)
    assert torch.equal(table, table.T)
    assert not table.diagonal().any()
    weights = torch.rand(300, 300, dtype=torch.float64)
    (found,) = torch.autograd.grad((table * weights).sum(), values)
    assert torch.equal(found, (weights + weights.T)[pairs[:, 0], pairs[:, 1]])
