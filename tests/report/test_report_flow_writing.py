from dataclasses import replace

import numpy as np
import pytest
from flow_report_cases import image_flow, straight_flow

from otdd_flash.data import load
from otdd_flash.errors import InputError
from otdd_flash.report.flow import writing as flow_writing
from otdd_flash.report.flow.writing import write_flow_report

ALWAYS = ["adapted.npz", "adapted", "metrics.csv", "trajectory.npz", "objective.png", "paths.png"]


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def listing(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("classes", [3, None])
def test_a_report_has_all_its_files(tmp_path, datasets, classes):
    """Those of a first report are replaced by those of a second."""
    write_flow_report(straight_flow(classes, d=2, n=9, keep=9), tmp_path / "run")
    flow = straight_flow(classes)
    double = replace(flow.trajectory, points=flow.trajectory.points.double())
    written = write_flow_report(replace(flow, trajectory=double), tmp_path / "run")
    assert [path.name for path in written.written] == ALWAYS
    assert listing(tmp_path / "run") == set(ALWAYS)
    adapted = load("arrays", path=str(tmp_path / "run" / "adapted.npz"))
    np.testing.assert_array_equal(adapted.inputs, flow.samples.features)
    assert adapted.class_names == flow.samples.class_names
    table = datasets.load_from_disk(str(tmp_path / "run" / "adapted"))
    assert table.column_names == ["features"] + ([] if classes is None else ["label"])
    assert table.features["features"].length == 4
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 1 + len(flow.history)
    # The thinned trajectory is on disk, in float32.
    with np.load(tmp_path / "run" / "trajectory.npz") as archive:
        keys = ["rows", "steps", "points"] + ([] if classes is None else ["labels"])
        assert archive.files == keys
        assert archive["points"].dtype == np.float32
        for key in keys:
            np.testing.assert_array_equal(archive[key], getattr(flow.trajectory, key))


def test_images_have_pictures_and_an_animation(tmp_path, datasets):
    written = write_flow_report(image_flow(steps=2), tmp_path / "run", image_shape=(1, 5, 4))
    assert [path.name for path in written.written] == [*ALWAYS, "images.png", "flow.gif"]
    assert listing(tmp_path / "run") == {*ALWAYS, "images.png", "flow.gif"}
    table = datasets.load_from_disk(str(tmp_path / "run" / "adapted"))
    assert table[0]["image"].size == (4, 5)
    # A wrong shape is refused before anything is written.
    with pytest.raises(InputError, match="no images of shape"):
        write_flow_report(image_flow(steps=1), tmp_path / "other", image_shape=(1, 5, 5))
    assert not (tmp_path / "other").exists()


def test_data_are_safe_before_pictures_are_drawn(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(flow_writing, "draw_objective", fail)
    with pytest.raises(KeyboardInterrupt):
        write_flow_report(straight_flow(), tmp_path)
    assert listing(tmp_path) >= set(ALWAYS[:4])
