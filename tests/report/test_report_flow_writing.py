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


@pytest.mark.slow
@pytest.mark.parametrize("classes", [3, None])
def test_a_report_has_all_its_files(tmp_path, datasets, classes):
    """Those of a first report are replaced by those of a second."""
    run, flow = tmp_path / "run", straight_flow(classes)
    run.mkdir()
    for name in ALWAYS[2:]:
        (run / name).write_text("of an earlier report")
    double = replace(flow.trajectory, points=flow.trajectory.points.double())
    written = write_flow_report(replace(flow, trajectory=double), run)
    assert [path.name for path in written.written] == ALWAYS
    assert listing(run) == set(ALWAYS)
    adapted = load("arrays", path=str(run / "adapted.npz"))
    np.testing.assert_array_equal(adapted.inputs, flow.samples.features)
    assert adapted.class_names == flow.samples.class_names
    table = datasets.load_from_disk(str(run / "adapted"))
    assert table.column_names == ["features"] + ([] if classes is None else ["label"])
    assert table.features["features"].length == 4
    assert (run / "metrics.csv").read_text().count("\n") == 1 + len(flow.history)
    assert (run / "paths.png").read_bytes()[1:4] == b"PNG"
    # The thinned trajectory is on disk, in float32.
    with np.load(run / "trajectory.npz") as archive:
        keys = ["rows", "steps", "points"] + ([] if classes is None else ["labels"])
        assert archive.files == keys
        assert archive["points"].dtype == np.float32
        for key in keys:
            np.testing.assert_array_equal(archive[key], getattr(flow.trajectory, key))


@pytest.mark.slow
def test_images_have_pictures_and_data_are_safe_before_any_is_drawn(
    tmp_path, datasets, monkeypatch
):
    run = tmp_path / "run"
    # A wrong shape is refused before anything is written.
    with pytest.raises(InputError, match="no images of shape"):
        write_flow_report(image_flow(steps=1), run, image_shape=(1, 5, 5))
    assert not run.exists()
    written = write_flow_report(image_flow(steps=2), run, image_shape=(1, 5, 4))
    assert [path.name for path in written.written] == [*ALWAYS, "images.png", "flow.gif"]
    assert listing(run) == {*ALWAYS, "images.png", "flow.gif"}
    table = datasets.load_from_disk(str(run / "adapted"))
    assert table[0]["image"].size == (4, 5)

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(flow_writing, "draw_objective", fail)
    with pytest.raises(KeyboardInterrupt):
        write_flow_report(straight_flow(), tmp_path / "other")
    assert listing(tmp_path / "other") >= set(ALWAYS[:4])
