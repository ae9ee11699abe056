"""Studies of tasks with several labels a row, and with numbers."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

SETTINGS = {"transfer": None, "measures": ["otdd", "frechet"], "epsilon_relative": 0.1}


def task(seed, *, numbers=False):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 2, generator=draw) + seed / 2
    if numbers:
        return LabeledSamples(x, None, (), targets=(seed + 1) * torch.randn(24, generator=draw))
    indicator = torch.rand(24, 3, generator=draw) < 0.4
    indicator[torch.arange(24), torch.arange(24) % 3] = True
    return LabeledSamples(x, indicator, tuple("abc"))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("labels", ["gaussian", "continuous"])
def test_distances_are_those_of_pairs(labels, tmp_path):
    tasks = {f"task {k}": task(k, numbers=labels == "continuous") for k in range(3)}
    settings = {**SETTINGS, "labels": labels, "subsample": 40, "noise_floor": True}
    found = otdd.Study(tasks, **settings).run(tmp_path / "study", threads=1)
    assert found.complete
    assert not found.failures
    pairs = {(row.source, row.target): row for row in found.pairs() if row.measure == "otdd"}
    whole = otdd.pairwise_distances([*tasks.values()], labels=labels, epsilon_relative=0.1)
    for i, j in ((0, 1), (1, 2)):
        row = pairs[f"task {i}", f"task {j}"]
        assert row.value == pytest.approx(float(whole.values[i, j]), rel=1e-5)
        assert row.sample_lower < row.value < row.sample_upper
    again = otdd.Study(tasks, **settings).run(tmp_path / "study", resume=True, threads=1)
    assert again.pairs() == found.pairs()


def test_measures_of_one_class_a_row_are_refused(tmp_path):
    tasks = {f"task {k}": task(k) for k in range(3)}
    study = otdd.Study(tasks, transfer=None)
    with pytest.raises(InputError, match=r"^sliced, otce are measures of one class a row"):
        study.run(tmp_path / "study")
    tasks = {name: (one, task(9)) for name, one in {**tasks, "four": task(4)}.items()}
    with pytest.raises(InputError, match="networks learn one class a row; set transfer=null"):
        otdd.Study(tasks, measures=["otdd"]).run(tmp_path / "study")
    with pytest.raises(InputError, match=r"^sliced is a measure of one class a row, and"):
        otdd.Study(tasks, measures=["sliced"], transfer=None).run(tmp_path / "study")


def test_labels_that_the_metric_cannot_compare_are_refused_before_any_unit(tmp_path):
    folder = tmp_path / "study"
    tasks = {f"task {k}": task(k, numbers=True) for k in range(3)}
    for labels in ("gaussian", otdd.labels.Tree({"a": "r", "b": "r", "c": "r"})):
        with pytest.raises(InputError, match=r"^task 0 has numbers and no classes; labels=cont"):
            otdd.Study(tasks, **SETTINGS, labels=labels).run(folder)
        with pytest.raises(InputError, match=r"^task 0 has numbers and no classes; labels=cont"):
            otdd.Study({**tasks, "sets": task(4)}, **SETTINGS, labels=labels).run(folder)
    several = {f"task {k}": task(k) for k in range(3)}
    with pytest.raises(InputError, match=r"^class 'c' is not in the tree of labels=tree"):
        otdd.Study(several, **SETTINGS, labels=otdd.labels.Tree({"a": "r", "b": "r"})).run(folder)
    assert not folder.exists() or not [*folder.iterdir()]
    # Measures of features alone compare them all the same.
    features = {**SETTINGS, "measures": ["frechet"]}
    assert not otdd.Study(tasks, **features).run(folder).failures
    assert not otdd.Study(tasks, **SETTINGS, labels="none").run(tmp_path / "plain").failures
