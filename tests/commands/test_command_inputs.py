"""What is read: files, columns, clusters, rows, caches of features, and their notices."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import otdd_flash as otdd

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = ("source=arrays", "source.path=a.npz", "target=arrays", "target.path=b.npz")
BOTH = ("source=arrays", "source.path=x.npz", "target=arrays")
CLUSTERED = ("source.pseudo_labels=kmeans", "target.pseudo_labels=kmeans")
NETWORK = ("source=digits", "target=digits", "extractor=timm", "extractor.model=test_vit")
NETWORK = (*NETWORK, "max_samples=10", "epsilon=1", "report=none")


@pytest.mark.slow
def test_what_readers_chose_and_fewer_samples_than_asked_for_are_said(command, read):
    Path("t.csv").write_text("a,b,c,d,kind\n" + "1,2,3,4,x\n2,3,4,5,y\n" * 30)
    table = ("source=arrays", "source.path=t.csv", "target.dim=4", "source.max_samples=1000")
    ended = command(*table, "report=none")
    assert "notice: t.csv: labels are its column 'kind', the only one of text" in ended.err
    assert "fewer than max_samples=1000: all are taken" in ended.err
    said = ["labels are its column 'kind', the only one of text"]
    said.append("inputs are its 4 other columns: a, b, c, d")
    result = read("run/result.json")
    assert (result["choices"], result["n"]) == ({"source": said}, 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "source", "target"),
    [
        (("target.path=b.npz", "source.pseudo_labels=kmeans"), 3, 3),
        (("target.path=x.npz", *CLUSTERED, "source.k=2", "target.k=4"), 2, 4),
        # A side that has labels may be clustered all the same.
        (("target.path=b.npz", *CLUSTERED, "target.k=5"), 5, 5),
        (("target.path=b.npz", "labels=none"), None, None),
    ],
)
def test_unlabelled_sides_can_be_clustered_or_compared_without_classes(
    command, read, settings, source, target
):
    np.savez("x.npz", x=np.load("a.npz")["x"])
    assert command(*BOTH, *settings, "epsilon=9", "report=none").code == 0
    result = read("run/result.json")
    if source is None:
        assert result["labels"] == "none"
        return
    assert [len(result["classes"][side]) for side in ("source", "target")] == [source, target]
    assert result["classes"]["source"][0] == "cluster 0"


def _table(path: str) -> np.ndarray:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return np.array([row[1:] for row in list(csv.reader(file))[1:]], dtype=float)


@pytest.mark.slow
def test_full_class_distances_are_those_of_the_whole_data(command, read):
    drawn = (*ARRAYS, "max_samples=30", "epsilon=5")
    treatment = ("extractor.standardize=true", "extractor.pca=3")
    assert command(*drawn, *treatment, "labels.full=true", "hydra.run.dir=full").code == 0
    sides = [otdd.embed(otdd.load("arrays", path=f"{name}.npz")) for name in "ab"]
    sides = otdd.extractors.reduce_pca(*otdd.extractors.standardize(*sides), 3, 0)
    whole = otdd.dataset_distance(*sides, epsilon=5).class_distances.full
    assert torch.allclose(torch.from_numpy(_table("full/class_distances.csv")), whole, rtol=1e-5)
    # The rows drawn from the embedded whole are those that max_samples draws.
    for run in ("true", "false"):
        assert command(*drawn, f"labels.full={run}", f"hydra.run.dir=full_{run}").code == 0
    found, part = (read(f"full_{run}/result.json") for run in ("true", "false"))
    tables = [_table(f"full_{run}/class_distances.csv") for run in ("true", "false")]
    assert not np.allclose(*tables, rtol=0.01)
    assert found["n"] == 30
    for key in ("subset_hash", "fingerprints"):
        assert part[key] == found[key]


@pytest.mark.slow
def test_a_cache_of_features_that_is_unwritable_or_damaged_is_said_and_done_without(command, read):
    Path("file").write_text("")
    ended = command(*NETWORK, "cache_dir=file/cache", "hydra.run.dir=first")
    assert ended.code == 0
    assert "warning: cannot read the cache in file/cache" in ended.err
    assert "cache_dir=DIR" in ended.err
    assert "damaged" not in command(*NETWORK, "cache_dir=cache").err
    entry = sorted(Path("cache").iterdir())[0]
    entry.write_bytes(entry.read_bytes()[:-4] + b"oops")
    ended = command(*NETWORK, "cache_dir=cache", "hydra.run.dir=second")
    assert ended.code == 0
    assert f"warning: deleting the damaged cache entry {entry}" in ended.err
    assert read("first/result.json")["value"] == read("second/result.json")["value"]
