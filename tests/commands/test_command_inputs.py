"""Bad input: exit code 2 and one message with the value and the way out."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import otdd_flash as otdd

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = ("source=arrays", "target=arrays", "target.path=b.npz")


@pytest.fixture(autouse=True)
def archives(folder: Path) -> None:
    """Archives with one fault each, made from a good one."""
    good = dict(np.load(folder / "a.npz"))
    x, y = good["x"], good["y"]
    holes = x.copy()
    holes[3, 2], holes[7, 1] = np.nan, np.inf
    np.savez("unlabelled.npz", x=x)
    np.savez("no_x.npz", z=x, y=y)
    np.savez("holes.npz", x=holes, y=y)
    np.savez("empty.npz", x=x[:0], y=y[:0])
    np.savez("lonely.npz", x=x, y=np.where(np.arange(60) == 59, "single", y))
    np.savez("continuous.npz", x=x, y=np.linspace(0, 1, 60))
    np.savez("objects.npz", x=x, y=np.array([1, None] * 30, dtype=object))
    np.savez("wide.npz", x=np.hstack([x, x]), y=y)
    Path("damaged.npz").write_bytes(Path("a.npz").read_bytes()[:99])
    Path("text.npz").write_text("not an archive")
    np.savez("W_other.npz", xx=np.zeros((2, 2)), xy=np.zeros((2, 3)), yy=np.zeros((3, 3)))
    np.savez("W_partial.npz", xx=np.zeros((3, 3)))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("nowhere.npz", ("source: ", "nowhere.npz does not exist")),
        ("damaged.npz", ("source: ", "damaged.npz", "damaged or empty")),
        ("text.npz", ("source: ", "text.npz", "no NumPy file")),
        ("objects.npz", ("source: ", "objects.npz", "integers or strings")),
        ("no_x.npz", ("source: ", "no key 'x'", "z, y")),
        ("holes.npz", ("source: ", "2 NaN or infinite", "2 rows", "row 3, column 2", "impute")),
        ("empty.npz", ("source: ", "empty", "no rows")),
        ("continuous.npz", ("source: ", "integers or strings", "float64")),
        ("wide.npz", ("8 features", "4", "the same columns")),
        ("unlabelled.npz", ("no labels", "source.pseudo_labels", "labels=none")),
        ("null", ("source: ", "path=PATH")),
    ],
)
def test_bad_files(command, path, parts):
    ended = command(*ARRAYS, f"source.path={path}", "max_samples=null")
    assert ended.code == 2
    assert len(ended.complaints) == 1
    for part in parts:
        assert part in ended.error


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("epsilon=0", ("epsilon must be positive", "0")),
        ("epsilon=nan", ("epsilon must be positive", "nan")),
        ("epsilon_relative=-2", ("epsilon_relative must be positive", "-2")),
        ("lambda_x=-1", ("lambda_x", "-1")),
        ("lambda_y=-0.5", ("lambda_y", "-0.5")),
        ("solver.tolerance=1e-12", ("1e-12", "too tight for float32", "precision=double")),
        ("solver.tolerance=0", ("solver.tolerance", "0")),
        ("solver.max_iterations=0", ("solver.max_iterations", "0")),
        ("solver.max_iterations=1.5", ("solver.max_iterations", "1.5")),
        ("epsilon=abc", ("epsilon must be a number", "abc")),
        ("debias=maybe", ("debias must be true or false", "maybe")),
        ("max_samples=3", ("max_samples=3", "5 classes", "raise max_samples")),
        ("max_samples=0", ("max_samples", "0")),
        ("source.max_samples=abc", ("source: ", "max_samples", "abc")),
        ("source.classes=[0,unheard]", ("source: ", "'unheard'", "0, 1, 2, 3, 4")),
        ("source.classes=1.5", ("source: ", "a class in classes must be an integer, got 1.5")),
        ("source.name=nothing", ("'nothing'", "digits", "arrays")),
        ("source.spread=inf", ("spread", "finite", "inf")),
        ("source.pseudo_labels=magic", ("'magic'", "kmeans")),
        ("source.k=4", ("source: ", "k=4 needs pseudo_labels=kmeans")),
        ("extractor.name=nothing", ("'nothing'", "identity")),
        ("extractor=pixels", ("array data", "identity")),
        ("extractor.standardize=maybe", ("extractor.standardize", "true or false", "maybe")),
        ("extractor.batch_size=abc", ("extractor.batch_size", "abc")),
        ("extractor.pca=99", ("extractor.pca", "99")),
        ("labels.method=nothing", ("'nothing'", "gaussian")),
        ("labels=given", ("labels.path=W.npz",)),
        ("min_class_size=0", ("min_class_size", "0")),
        ("device=nothing", ("'nothing'", "auto, cpu")),
        ("device=cuda:99", ("cuda:99", "on this machine", "auto, cpu")),
        ("backend=nothing", ("'nothing'", "auto, torch")),
        ("precision=nothing", ("'nothing'", "double")),
        ("memory_budget=lots", ("memory_budget", "lots", "GiB")),
        ("log_level=LOUD", ("log_level", "'LOUD'", "INFO")),
        ("data_root=[a]", ("data_root must be text or null", "a")),
    ],
)
def test_bad_settings(command, setting, parts):
    ended = command(setting)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    for part in parts:
        assert part in ended.error


def test_a_grey_scale_setting_is_not_guessed(command):
    ended = command("source=digits", "target=digits", "extractor=pixels", "extractor.grayscale=yep")
    assert "extractor.grayscale must be true or false, got 'yep'" in ended.error


def test_a_functional_that_is_no_mapping_is_refused_before_anything_is_read(flow_command):
    ended = flow_command(*ARRAYS, "source.path=nowhere.npz", "flow.functionals=[3]")
    assert ended.code == 2
    assert "a functional must be a mapping such as {name: norm, weight: 0.1}, got 3" in ended.error


@pytest.mark.parametrize("run", ["command", "flow_command"])
@pytest.mark.parametrize(
    "setting", ["backend=nothing", "epsilon=-1", "epsilon_relative=nan", "min_class_size=0"]
)
def test_a_bad_setting_is_found_before_anything_is_read(request, run, setting):
    found = request.getfixturevalue(run)(*ARRAYS, "source.path=nowhere.npz", setting)
    assert found.code == 2
    assert setting.partition("=")[0] in found.error


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("nowhere.npz", ("nowhere.npz", "no such file")),
        ("text.npz", ("text.npz", "xx, xy and yy")),
        ("W_partial.npz", ("no array xy, yy", "xx")),
        ("W_other.npz", ("2 source classes", "3", "u, v, w")),
    ],
)
def test_bad_class_distances(command, path, parts):
    ended = command(*ARRAYS, "source.path=a.npz", "labels=given", f"labels.path={path}")
    assert ended.code == 2
    for part in parts:
        assert part in ended.error


def test_a_small_class_can_be_dropped_with_a_notice(command, read):
    lonely = (*ARRAYS, "source.path=lonely.npz", "max_samples=null", "min_class_size=2")
    ended = command(*lonely)
    assert ended.code == 0
    assert ended.err.startswith("notice: dropped classes of lonely")
    assert "single (1)" in ended.err
    assert read("run/result.json")["classes"]["source"] == ["u", "v", "w"]


def test_more_samples_than_there_are_is_a_notice(command, read):
    ended = command(*ARRAYS, "source.path=a.npz", "max_samples=1000")
    assert ended.code == 0
    assert ended.err.count("fewer than max_samples=1000: all are taken") == 2
    assert read("run/result.json")["n"] == 60


BOTH = ("source=arrays", "source.path=unlabelled.npz", "target=arrays")
BOTH_CLUSTERED = ("source.pseudo_labels=kmeans", "target.pseudo_labels=kmeans")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "source", "target"),
    [
        (("target.path=b.npz", "source.pseudo_labels=kmeans"), 3, 3),
        (("target.path=b.npz", "source.pseudo_labels=kmeans", "source.k=2"), 2, 3),
        (("target.path=unlabelled.npz", *BOTH_CLUSTERED, "source.k=4"), 4, 4),
        (("target.path=unlabelled.npz", *BOTH_CLUSTERED, "target.k=4"), 4, 4),
        (("target.path=unlabelled.npz", *BOTH_CLUSTERED, "source.k=2", "target.k=4"), 2, 4),
        # A side that has labels may be clustered all the same.
        (("target.path=b.npz", *BOTH_CLUSTERED, "target.k=5"), 5, 5),
    ],
)
def test_unlabelled_sides_can_be_clustered(command, read, settings, source, target):
    ended = command(*BOTH, *settings, "epsilon=1")
    assert ended.code == 0
    classes = read("run/result.json")["classes"]
    assert (len(classes["source"]), len(classes["target"])) == (source, target)
    assert classes["source"][0] == "cluster 0"


@pytest.mark.slow
@pytest.mark.parametrize("clustered", [BOTH_CLUSTERED, BOTH_CLUSTERED[:1]])
def test_clusters_need_a_number_where_no_side_has_labels(command, clustered):
    ended = command(*BOTH, "target.path=unlabelled.npz", *clustered)
    assert ended.code == 2
    assert "source.k=K" in ended.error


def test_unlabelled_sides_are_compared_without_class_distances(command, read):
    assert command(*BOTH, "target.path=b.npz", "labels=none").code == 0
    assert read("run/result.json")["labels"] == "none"


def _table(path: str) -> np.ndarray:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return np.array([row[1:] for row in list(csv.reader(file))[1:]], dtype=float)


@pytest.mark.slow
@pytest.mark.parametrize("treatment", [(), ("extractor.standardize=true", "extractor.pca=3")])
def test_full_class_distances_are_those_of_the_whole_data(command, read, treatment):
    full = ("labels.full=true", "max_samples=30", "epsilon=5", *treatment)
    ended = command(*ARRAYS, "source.path=a.npz", *full)
    assert ended.code == 0
    assert ended.err == ""
    assert read("run/result.json")["n"] == 30

    sides = [
        otdd.embed(otdd.load("arrays", path=f"{name}.npz"), otdd.extractors.identity())
        for name in "ab"
    ]
    if treatment:
        sides = otdd.extractors.reduce_pca(*otdd.extractors.standardize(*sides), 3, 0)
    whole = otdd.dataset_distance(*sides, epsilon=5).class_distances.full
    assert torch.allclose(torch.from_numpy(_table("run/class_distances.csv")), whole, rtol=1e-5)

    assert command(*ARRAYS, "source.path=a.npz", *full, "labels.full=false").code == 0
    assert not np.allclose(_table("run/class_distances.csv"), whole, rtol=0.01)


@pytest.mark.slow
def test_full_class_distances_compare_the_same_samples(command, read):
    """The rows drawn from the embedded whole are those that max_samples draws."""
    chosen = (*ARRAYS, "source.path=a.npz", "max_samples=30")
    command(*chosen, "hydra.run.dir=part")
    command(*chosen, "labels.full=true", "hydra.run.dir=full")
    part, full = read("part/result.json"), read("full/result.json")
    assert part["subset_hash"] == full["subset_hash"]
    assert part["fingerprints"] == full["fingerprints"]


NETWORK = ("source=digits", "target=digits", "extractor=timm", "extractor.model=test_vit")
NETWORK = (*NETWORK, "max_samples=20", "epsilon=1")


@pytest.mark.slow
def test_an_unwritable_cache_is_said_and_done_without(command, folder):
    (folder / "file").write_text("")
    ended = command(*NETWORK, "cache_dir=file/cache")
    assert ended.code == 0
    assert "warning: cannot read the cache in file/cache" in ended.err
    assert "cache_dir=DIR" in ended.err


@pytest.mark.slow
def test_a_damaged_cache_entry_is_said_and_rebuilt(command, read):
    command(*NETWORK, "cache_dir=cache", "hydra.run.dir=first")
    entry = sorted(Path("cache").iterdir())[0]
    entry.write_bytes(entry.read_bytes()[:-4] + b"oops")
    ended = command(*NETWORK, "cache_dir=cache", "hydra.run.dir=second")
    assert ended.code == 0
    assert f"warning: deleting the damaged cache entry {entry}" in ended.err
    assert command(*NETWORK, "cache_dir=cache").err.count("damaged") == 0
    assert read("first/result.json")["value"] == read("second/result.json")["value"]


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
    ended = command(
        "source=image_folder", "source.path=photos", "target=huggingface", "target.path=photos",
        "extractor=pixels", "epsilon=1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    assert (result["value"], result["bounds"]) == (0, [0, 0])
    assert ended.err.count("laid on white") == 1
