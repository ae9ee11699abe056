"""Features in Arrow files: those of `datasets`, every layout that is read, and every damage."""

import copy
import os

import numpy as np
import pyarrow as pa
import pytest
import torch
from refusals import naming

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.features import file_features
from otdd_flash.features.file_features import FileFeatures, ScatteredFeatures
from otdd_flash.operators import blocked, comparison

N, DIM = 70, 3


def points(dtype=np.float32):
    return np.random.default_rng(0).normal(size=(N, DIM)).astype(dtype)


def column(rows, kind="fixed"):
    values = pa.array(rows.reshape(-1))
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(values, DIM)
    ends = np.arange(len(rows) + 1) * DIM
    if kind == "list":
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values)
    return pa.LargeListArray.from_arrays(pa.array(ends), values)


def written(path, arrays, *, file=False, options=None):
    """A file with a batch of rows for each array, beside a column of numbers."""
    schema = pa.schema({"number": pa.int64(), "features": arrays[0].type})
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(str(path), schema, options=options) as writer:
        for array in arrays:
            numbers = pa.array(np.arange(len(array)))
            writer.write_batch(pa.record_batch([numbers, array], schema=schema))
    return path


def saved(folder, **more):
    """A folder of Dataset.save_to_disk."""
    import datasets

    rows = points()
    typed = datasets.Features({"features": datasets.Sequence(datasets.Value("float32"), DIM)})
    given = datasets.Dataset.from_dict({"features": rows.tolist()}, features=typed)
    given.save_to_disk(folder, num_shards=3, **more)
    return folder


@pytest.mark.parametrize(
    ("kind", "dtype", "file"),
    [("fixed", np.float16, True), ("list", np.float32, False), ("large", np.float64, True)],
)
def test_one_batch_is_mapped_and_several_are_read(kind, dtype, file, tmp_path):
    whole = points(dtype)
    path = written(tmp_path / "one.arrow", [column(whole, kind)], file=file)
    one = otdd.features_file(path)
    assert type(one) is FileFeatures
    # One of them holds nothing.
    parts = [column(part, kind) for part in np.split(whole, (20, 20, 55))]
    several = otdd.features_file(written(tmp_path / "many.arrow", parts, file=file), key="features")
    assert type(several) is ScatteredFeatures
    rows = torch.tensor([69, 3, 3, 19, 20, -1, 54, 55])
    for found in (one, several):
        assert torch.equal(found, torch.from_numpy(whole))
        assert torch.equal(found[15:60], torch.from_numpy(whole[15:60]))
        assert torch.equal(found[rows], torch.from_numpy(whole[rows]))
        out = torch.empty(39, DIM, dtype=found.dtype)
        found.file.read(slice(18, 57), out)
        assert torch.equal(out, torch.from_numpy(whole[18:57]))
        assert type(found[:3]) is type(found[rows]) is torch.Tensor
    samples = otdd.LabeledSamples(several, None, ())
    assert samples.features is several
    assert samples.fingerprint == otdd.LabeledSamples(one, None, ()).fingerprint


def test_pieces_answer_as_a_tensor_does_and_cannot_be_changed(tmp_path):
    whole = torch.from_numpy(points())
    parts = [column(part) for part in np.split(points(), (20, 55))]
    features = otdd.features_file(written(tmp_path / "x.arrow", parts))
    square, place = torch.tensor([[0, 69], [20, 3]]), torch.tensor(54)
    for use in (
        lambda x: x[square],
        lambda x: x[place],
        lambda x: x[:, torch.tensor([2, 0])],
        lambda x: x[torch.arange(N) % 2 == 0],
        lambda x: copy.deepcopy(x)[18:22],
        lambda x: torch.empty(N, DIM).copy_(x),
    ):
        assert torch.equal(use(features), use(whole))
    for change in (
        lambda: features.add_(1),
        lambda: features.__isub__(whole),
        lambda: torch.add(whole, 1, out=features),
        lambda: features.detach().zero_(),
        lambda: features.__setitem__(0, 0.0),
    ):
        with pytest.raises(InputError, match="features in files cannot be changed in place"):
            change()


def test_rows_are_read_in_blocks_and_what_is_no_number_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(file_features, "BLOCK_BYTES", 200)
    rows, read = file_features.FeatureFile.rows, []
    monkeypatch.setattr(
        file_features.FeatureFile,
        "rows",
        lambda file, some: read.append(some.stop - some.start) or rows(file, some),
    )
    features = otdd.features_file(written(tmp_path / "good.arrow", [column(points())] * 2))
    otdd.LabeledSamples(features, None, ()).take(torch.arange(0, N, 5))
    assert 0 < max(read) <= 200 // (4 * DIM)
    bad = points()
    bad[50, 1] = np.nan
    features = otdd.features_file(written(tmp_path / "bad.arrow", [*map(column, np.split(bad, 7))]))
    with pytest.raises(InputError, match="first at row 50, column 1"):
        otdd.LabeledSamples(features, None, ())


def test_datasets_are_opened_as_they_were_saved_and_others_are_refused(tmp_path):
    import datasets

    folder = saved(tmp_path / "saved")
    given = datasets.load_from_disk(str(folder))
    for found in (otdd.features_file(folder), otdd.features_file(given, key="features")):
        assert len(found.file.pieces) == 3
        assert torch.equal(found, torch.from_numpy(points()))
    with pytest.raises(InputError, match="the dataset lies in memory"):
        otdd.features_file(datasets.Dataset.from_dict({"x": [[1.0]]}))
    number = given.add_column("number", list(range(N)))
    double = given.map(lambda row: {"other": [2 * value for value in row["features"]]})
    for kept in (
        number,
        number.remove_columns("number"),
        double.select_columns("features"),
        datasets.concatenate_datasets([given.select_columns("features")] * 2),
        # A slice of whole files.
        given.select(range(24, 47)),
    ):
        features = otdd.features_file(kept, key="features" if kept is double else None)
        assert torch.equal(features, torch.tensor(kept["features"][:]))
    row = {"features": [9.0] * DIM}
    swapped = double.rename_columns({"other": "features", "features": "other"})
    for other in (
        given.select(range(N - 1)),
        given.shuffle(seed=0),
        # As many rows as there are in the files.
        given.select(range(N - 1)).add_item(row),
        given.rename_column("features", "renamed"),
        swapped,
    ):
        key = "features" if other is swapped else None
        with pytest.raises(InputError, match="the dataset is not what its files hold, but a sel"):
            otdd.features_file(other, key=key)
    # A file that changes is refused where it is used.
    features = otdd.features_file(folder)
    os.utime(folder / "data-00002-of-00003.arrow", (1, 1))
    for use in (lambda: otdd.LabeledSamples(features, None, ()), lambda: features[:2]):
        with pytest.raises(InputError, match=r"data-00002-of-00003\.arrow changed while it was in"):
            use()


@pytest.mark.slow
def test_a_distance_streams_them(tmp_path, monkeypatch):
    monkeypatch.setattr(blocked, "LEAST_POINTS", 32)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    parts = [column(part) for part in np.split(points(), 7)]
    features = otdd.features_file(written(tmp_path / "x.arrow", parts))
    labels = torch.arange(N) % 2
    target = otdd.LabeledSamples(torch.from_numpy(points()) + 1, labels, ("a", "b"))

    def distance(features, budget):
        source = otdd.LabeledSamples(features, labels, ("a", "b"))
        compute = otdd.ComputeOptions("cpu", precision="double", memory_budget=budget)
        settings = {"labels": "means", "epsilon": 3.0, "compute": compute}
        return otdd.dataset_distance(source, target, **settings)

    streamed, held = distance(features, 1), distance(torch.from_numpy(points()), "auto")
    assert streamed.streamed is not None
    assert streamed.value == pytest.approx(held.value, rel=1e-5)
    # And in what is kept of it.
    again = otdd.DistanceResult.load(streamed.save(tmp_path / "result"))
    assert torch.equal(again.source.features, held.source.features)


def test_damage_is_told_in_a_sentence(tmp_path):
    import datasets

    rows, names = points(), iter(range(100))
    content = written(tmp_path / "good.arrow", [column(rows), column(rows)]).read_bytes()

    def file(*arrays, **more):
        return written(tmp_path / f"{next(names)}.arrow", arrays, **more)

    def bytes_of(some):
        path = tmp_path / f"{next(names)}.arrow"
        path.write_bytes(some)
        return path

    good, floats = bytes_of(content), pa.list_(pa.float64(), 2)
    ragged = pa.array([[1.0, 2.0], [1.0, 2.0], [3.0]])
    null = pa.array([[1.0, 2.0], [3.0, None]], type=floats)
    zipped = pa.ipc.IpcWriteOptions(compression="lz4")
    lengths = saved(tmp_path / "lengths")
    train = datasets.load_from_disk(str(lengths))
    datasets.DatasetDict(train=train).save_to_disk(tmp_path / "dict")
    two = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)[:20]), 2)
    written(lengths / "data-00001-of-00003.arrow", [two])
    for name in ("bad", "plain"):
        (tmp_path / name).mkdir()
    (tmp_path / "bad" / "state.json").write_text("{}")
    cases = [
        (file(ragged), None, "is ragged: row 0 holds 2 numbers and row 2 1"),
        (good, "x", "has no 'x'; it holds number, fea"),
        (file(pa.array([[1.0, 2.0], None], type=floats)), None, "holds nulls, the first in row 1"),
        (file(null), None, "holds nulls, the first in row 1"),
        (file(null[:1], null), None, "holds nulls, the first in row 2"),
        (file(pa.array([[1, 2]])), None, "holds lists of int64; features are read from"),
        (good, "number", "holds int64; features are lists"),
        (file(column(rows), options=zipped), None, "is compressed"),
        (bytes_of(content[:-1000]), None, "no Arrow file, or a damaged one|cannot read"),
        (bytes_of(content[:-8]), None, "is truncated: the end of its stream is missing"),
        (bytes_of(b"nothing of the kind"), None, "no Arrow file, or a damaged one|cannot read"),
        (bytes_of(b""), None, "no Arrow file, or a damaged one"),
        (file(column(rows[:0])), None, "holds no rows"),
        (tmp_path / "none.arrow", None, "cannot read .*none.arrow: No such file"),
        (tmp_path / "dict", None, r"holds several splits; give the folder of one \(train\)"),
        (tmp_path / "bad", None, "state.json is damaged"),
        (tmp_path / "plain", None, "has no state.json"),
        (lengths, None, "holds lists of 2 torch.float32 from row 0 on, and of 3"),
    ]
    for path, key, says in cases:
        with naming(says), pytest.raises(InputError, match=says) as told:
            otdd.features_file(path, key=key)
        # One sentence, that no other wraps.
        assert "\n" not in str(told.value)
        assert str(told.value).count("features are") <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "list"])
def test_no_damage_leads_beyond_a_file(kind, tmp_path):
    """A bit flipped in what says where the numbers are: their length, type, place or end."""
    good = written(tmp_path / "good.arrow", [column(points()[:5], kind), column(points(), kind)])
    content = good.read_bytes()
    (first, _), refused = otdd.features_file(good).file.pieces, 0
    for place in range(first.offset):
        for bit in (0x01, 0x80):
            # Mapped files are not written over.
            path = tmp_path / f"{place}.{bit}.arrow"
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            try:
                found = otdd.features_file(path, key="features").file
            except InputError:
                refused += 1
                continue
            finally:
                path.unlink()
            assert found.shape[0] == N + 5
            for piece in found.pieces:
                assert piece.offset + piece.rows * found.row_bytes <= len(content)
    assert refused > first.offset // 2
