"""Features in files: what is read of each type, and what damage or a change says."""

import copy
import json
import os
import pickle

import numpy as np
import pytest
import torch
from refusals import naming
from safetensors.torch import save_file

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.features import file_features
from otdd_flash.features.file_features import FileFeatures

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def points(dtype=torch.float32):
    return torch.randn(70, 3, generator=torch.Generator().manual_seed(0)).to(dtype)


def written(folder, kind, dtype=torch.float32):
    path = folder / f"features.{kind}"
    if kind == "npy":
        np.save(path, points(dtype).numpy())
    else:
        save_file({"features": points(dtype), "labels": torch.arange(70)}, path)
    return path


def test_a_file_holds_what_was_written(tmp_path):
    # numpy has no bfloat16.
    for kind, dtype in (("npy", torch.float64), *(("safetensors", dtype) for dtype in DTYPES)):
        path = written(tmp_path, kind, dtype)
        features = otdd.features_file(path, key=None if kind == "npy" else "features")
        with naming((kind, dtype)):
            assert isinstance(features, FileFeatures)
            assert torch.equal(features, points(dtype))
            out = torch.empty(20, 3, dtype=dtype)
            features.file.read(slice(33, 53), out)
            assert torch.equal(out, points(dtype)[33:53])
        samples = otdd.LabeledSamples(features, None, ())
        assert samples.features is features
        # What operations make of it is in memory.
        assert type(samples.take(torch.tensor([5, 2])).features) is torch.Tensor
        # Mapped files are not written over.
        path.unlink()


def test_a_file_that_changes_is_refused_where_it_is_used(tmp_path):
    path = written(tmp_path, "npy")
    features = otdd.features_file(path)
    samples = otdd.LabeledSamples(features, None, ())
    labelled = otdd.LabeledSamples(features, torch.arange(70) % 2, ("a", "b"))
    np.save(path, points().numpy() + 1)
    os.utime(path, (1, 1))
    for use in (
        lambda: otdd.LabeledSamples(features, None, ()),
        lambda: otdd.dataset_distance(samples, samples, labels="none", compute="cpu"),
        lambda: otdd.sinkhorn_loss(features, points(), epsilon=1.0),
        lambda: samples.take(torch.tensor([0])),
        lambda: labelled.keep_classes([1]),
    ):
        with pytest.raises(InputError, match="changed while it was in use"):
            use()


def test_a_file_that_changes_while_rows_are_read_is_refused(tmp_path, monkeypatch):
    """Of the same size, so that nothing is missing: the last pass would not find out."""

    def changed(read):
        def reading(*args, **kwargs):
            found = read(*args, **kwargs)
            os.utime(path, (1, 1))
            return found

        return reading

    for way, rows, count in (("read", slice(3, 60), 57), ("take", torch.tensor([5, 2]), 2)):
        path = written(tmp_path, "npy")
        file = otdd.features_file(path).file
        for name in ("_read", "_mapped"):
            monkeypatch.setattr(file, name, changed(getattr(file, name)))
        with naming(way), pytest.raises(InputError, match="changed while it was in use"):
            getattr(file, way)(rows, torch.empty(count, 3))
        path.unlink()


def test_a_file_that_another_replaces_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    path, located = written(tmp_path, "npy"), file_features._of_npy

    def replaced(*args):
        found = located(*args)
        np.save(path, points(torch.float64).numpy())
        return found

    monkeypatch.setattr(file_features, "_of_npy", replaced)
    with pytest.raises(InputError, match="changed while it was in use"):
        otdd.LabeledSamples(otdd.features_file(path), None, ())


def test_classes_without_samples_leave_features_in_their_file(tmp_path):
    """A name that no row has is no reason to read all of them."""
    features = otdd.features_file(written(tmp_path, "npy"))
    samples = otdd.LabeledSamples(features, torch.arange(70) % 2 * 2, ("a", "none", "b"))
    kept = samples.keep_classes([2, 0])
    assert kept.features is features
    assert kept.class_names == ("b", "a")
    assert torch.equal(kept.labels, 1 - torch.arange(70) % 2)
    compute = otdd.ComputeOptions("cpu", memory_budget=1)
    result = otdd.dataset_distance(samples, kept, labels="means", epsilon=5.0, compute=compute)
    assert isinstance(result.source.features, FileFeatures)


def test_streamed_points_with_relaxed_marginals(tmp_path):
    features = otdd.features_file(written(tmp_path, "npy"))
    streamed = otdd.LabeledSamples(features, None, ())
    resident = otdd.LabeledSamples(torch.from_numpy(np.load(tmp_path / "features.npy")), None, ())
    other = otdd.LabeledSamples(points()[:40] + 1, None, ())
    found = [
        otdd.dataset_distance(
            side,
            other,
            labels="none",
            unbalanced_relative=0.5,
            compute=otdd.ComputeOptions("cpu", memory_budget=1),
        )
        for side in (streamed, resident)
    ]
    assert isinstance(found[0].source.features, FileFeatures)
    assert found[0].value == pytest.approx(found[1].value, rel=1e-5)
    assert found[0].unmatched().moved == pytest.approx(found[1].unmatched().moved, rel=1e-3)


@pytest.mark.slow
def test_half_types_of_files_are_those_numbers_in_float32(tmp_path):
    """Particles would be rounded at every step, and class distances of bfloat16 have no number."""
    path = written(tmp_path, "safetensors", torch.bfloat16)
    labels, names = torch.arange(70) % 3, ("a", "b", "c")
    target = otdd.LabeledSamples(points() + 1, labels, names)

    def found(features):
        samples = otdd.LabeledSamples(features, labels, names)
        settings = {"epsilon": 0.5, "compute": "cpu"}
        moves = otdd.Flow(1, stepping=otdd.Stepping(0.1))
        flow = otdd.gradient_flow(samples, target, moves, **settings)
        result = otdd.dataset_distance(samples, target, labels="exact", **settings)
        loss = otdd.sinkhorn_loss(features, target.features, **settings)
        return [flow.samples.features, torch.tensor(result.value), loss]

    features = otdd.features_file(path, key="features")
    for one, other in zip(found(features), found(features[:]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_features_that_were_changed_in_place_are_refused(tmp_path):
    """They would be read as they were from the file, and as they are from memory."""
    features = otdd.features_file(written(tmp_path, "npy"))
    samples = otdd.LabeledSamples(features, None, ())
    copied = copy.deepcopy(features)
    features -= features.mean(0)
    for use in (
        lambda: otdd.LabeledSamples(features, None, ()),
        lambda: otdd.dataset_distance(samples, points(), labels="none", compute="cpu"),
        lambda: pickle.dumps(features),
        lambda: copy.deepcopy(features),
    ):
        with pytest.raises(InputError, match="features in files cannot be changed in place"):
            use()
    assert torch.equal(copied, points())
    assert otdd.LabeledSamples(copied, None, ()).features is copied


def test_damaged_and_other_files_are_refused_in_a_sentence(tmp_path):
    names = iter(range(100))

    def file(content, kind="safetensors"):
        path = tmp_path / f"{next(names)}.{kind}"
        path.write_bytes(content)
        return path

    def headed(**change):
        good = {"dtype": "F32", "shape": [7, 3], "data_offsets": [0, 84]}
        header = json.dumps({"x": good | change}).encode()
        header += b" " * (-len(header) % 8)
        return file(len(header).to_bytes(8, "little") + header + bytes(84))

    def array(values):
        np.save(path := tmp_path / f"{next(names)}.npy", values)
        return path

    assert otdd.features_file(headed()).shape == (7, 3)
    path, npy = written(tmp_path, "safetensors"), written(tmp_path, "npy")
    truncated, damaged = r"is truncated: its header promises \d+ bytes", "or a damaged one"
    for given, key, says in (
        (file(path.read_bytes()[:-571]), "features", truncated),
        (file(npy.read_bytes()[:-1], "npy"), None, truncated),
        (
            file(npy.read_bytes().replace(b"}", b" ", 1), "npy"),
            None,
            rf"is no \.npy file, {damaged}",
        ),
        (headed(shape=[-7, 3]), None, damaged),
        (headed(shape=["7", 3]), None, damaged),
        (headed(data_offsets=[-8, 76]), None, damaged),
        (headed(dtype=["F32"]), None, "holds .*; features are read from"),
        (headed(shape=[3, 3]), None, "gives 84 bytes to numbers of shape"),
        (headed(dtype="F16"), None, "gives 84 bytes to numbers of shape"),
        (path, None, "holds features, labels; say which matrix with key="),
        (path, "x", "has no 'x'; it holds features, labels"),
        (npy, "features", "holds one matrix, without a name; leave key=features out"),
        (path, "labels", "holds I64; features are read from"),
        (file(b"\x05\0\0\0\0\0\0\0{{{{{"), None, "no .safetensors file, or a damaged one"),
        (file(b"no array", "npy"), None, "no .npy file, or a damaged one"),
        (array(np.arange(6).reshape(2, 3)), None, "holds int64; features are read from"),
        (array(np.asfortranarray(np.ones((4, 3)))), None, "by columns"),
        (array(np.ones(4)), None, r"holds an array of shape \(4,\)"),
        (tmp_path / "none.npy", None, "cannot read .*none.npy: No such file"),
        (file(b"1,2", "csv"), None, "are read from .npy, .safetensors and .arrow files"),
    ):
        with naming(says), pytest.raises(InputError, match=says):
            otdd.features_file(given, key=key)
    with pytest.raises(InputError, match=r"labels must have shape \(70,\)"):
        otdd.LabeledSamples(otdd.features_file(npy), torch.zeros(69, dtype=torch.int64), ("a",))
