"""What is read: files, columns, clusters, rows, caches of features, and their notices."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import otdd_flash as otdd

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = ("source=arrays", "source.path=a.npz", "target=arrays", "target.path=b.npz")
BOTH = ("source=arrays", "source.path=x.npz", "target=arrays")
CLUSTERED = ("source.pseudo_labels=kmeans", "target.pseudo_labels=kmeans")
NETWORK = ("source=digits", "target=digits", "extractor=timm", "extractor.model=test_vit")
NETWORK = (*NETWORK, "max_samples=10", "epsilon=1", "report=none")


@pytest.mark.slow
def test_more_samples_than_there_are_is_a_notice(command, read):
    ended = command(*ARRAYS, "max_samples=1000", "epsilon=9", "report=none")
    assert ended.code == 0
    assert ended.err.count("fewer than max_samples=1000: all are taken") == 2
    assert read("run/result.json")["n"] == 60


@pytest.mark.slow
def test_what_readers_chose_is_said_and_in_the_result(command, read):
    Path("t.csv").write_text("a,b,c,d,kind\n" + "1,2,3,4,x\n2,3,4,5,y\n" * 30)
    table = ("source=arrays", "source.path=t.csv", "target.dim=4", "report=none")
    ended = command(*table)
    assert "notice: t.csv: labels are its column 'kind', the only one of text" in ended.err
    said = ["labels are its column 'kind', the only one of text"]
    said.append("inputs are its 4 other columns: a, b, c, d")
    assert read("run/result.json")["choices"] == {"source": said}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "source", "target"),
    [
        (("target.path=b.npz", "source.pseudo_labels=kmeans"), 3, 3),
        (("target.path=x.npz", *CLUSTERED, "source.k=4"), 4, 4),
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
@pytest.mark.parametrize("treatment", [(), ("extractor.standardize=true", "extractor.pca=3")])
def test_full_class_distances_are_those_of_the_whole_data(command, read, treatment):
    full = (*ARRAYS, "labels.full=true", "max_samples=30", "epsilon=5", *treatment)
    ended = command(*full, "hydra.run.dir=full")
    assert (ended.code, ended.err) == (0, "")
    sides = [
        otdd.embed(otdd.load("arrays", path=f"{name}.npz"), otdd.extractors.identity())
        for name in "ab"
    ]
    if treatment:
        sides = otdd.extractors.reduce_pca(*otdd.extractors.standardize(*sides), 3, 0)
    whole = otdd.dataset_distance(*sides, epsilon=5).class_distances.full
    assert torch.allclose(torch.from_numpy(_table("full/class_distances.csv")), whole, rtol=1e-5)
    assert command(*full, "labels.full=false").code == 0
    assert not np.allclose(_table("run/class_distances.csv"), whole, rtol=0.01)
    if not treatment:
        # The rows drawn from the embedded whole are those that max_samples draws.
        part, found = read("run/result.json"), read("full/result.json")
        assert found["n"] == 30
        assert part["subset_hash"] == found["subset_hash"]
        assert part["fingerprints"] == found["fingerprints"]


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


@pytest.mark.slow
def test_a_folder_is_at_no_distance_from_itself_whichever_reads_it(command, read, folder):
    """Photos that stand on their side, grey and colour, 8 and 16 bits, with and without alpha."""
    values = np.random.default_rng(1).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("cat", "dog"):
        place = folder / "photos" / name
        place.mkdir(parents=True)
        Image.fromarray(np.rot90(values[..., 0]).copy()).save(place / "0.jpg", exif=turned)
        Image.fromarray(values[..., 1].astype(np.uint16) * 257).save(place / "1.png")
        Image.fromarray(values).save(place / "2.png")
        Image.fromarray(255 - values).save(place / "3.png")
    sides = ("source=image_folder", "source.path=photos", "target=huggingface")
    ended = command(*sides, "target.path=photos", "extractor=pixels", "epsilon=1", "report=none")
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    assert (result["value"], result["bounds"]) == (0, [0, 0])
    assert ended.err.count("laid on white") == 1
