"""What `plot` of a result gives: the report's main picture, and no trace in matplotlib."""

from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from small_tasks import small_study

import otdd_flash as otdd
from otdd_flash.report.distance.writing import write_report
from otdd_flash.report.flow.writing import write_flow_report
from otdd_flash.report.pairwise import write_pairwise_report
from otdd_flash.report.study.writing import write_study_report

IMAGES = (1, 3, 2)


def some(seed, rows, classes=3):
    draw = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    features = draw.random((rows, 6)) / 2 + labels[:, None] / 6
    return otdd.LabeledSamples.from_arrays(features, labels, name=f"set $_{seed}")


def distance():
    return otdd.dataset_distance(some(0, 20), some(1, 25), epsilon=0.1)


def pairwise():
    return otdd.pairwise_distances([some(0, 20), some(1, 25), some(2, 15)], epsilon=0.1)


def flow():
    return otdd.gradient_flow(some(0, 20), some(1, 25), otdd.Flow(steps=2), epsilon=0.1)


def study(transfer=True):
    count, more = (4, {}) if transfer else (2, {"transfer": None})
    return small_study(count, measures=["frechet"], **more).run("study", threads=1)


def flow_images(result, folder):
    return write_flow_report(result, folder, image_shape=IMAGES)


# How a result is made, what draws it, what its report is and which picture that leads with.
KINDS = {
    "distance": (distance, {}, write_report, "projection"),
    "pairwise": (pairwise, {}, write_pairwise_report, "distances"),
    "flow": (flow, {}, write_flow_report, "objective"),
    "flow of images": (flow, {"image_shape": IMAGES}, flow_images, "images"),
    "study": (study, {}, write_study_report, "gains_against_frechet"),
    "study without transfer": (lambda: study(False), {}, write_study_report, "distances"),
}
LOADED = {"distance": otdd.DistanceResult, "pairwise": otdd.PairwiseResult}
LOADED |= dict.fromkeys(("flow", "flow of images"), otdd.FlowResult)


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_picture_that_the_report_leads_with(kind, tmp_path, monkeypatch):
    """Byte for byte, also of a result that was saved, and whatever style the user has."""
    monkeypatch.chdir(tmp_path)
    make, options, write, name = KINDS[kind]
    result = make()
    write(result, tmp_path / "report")
    if kind in LOADED:
        result = LOADED[kind].load(result.save(tmp_path / "saved"))
    expected = (tmp_path / "report" / f"{name}.png").read_bytes()
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30.0}):
        figure = result.plot(**options)
        # First: what is drawn later than the figure must not take their style.
        figure.savefig(tmp_path / "saved.png")
        assert (tmp_path / "saved.png").read_bytes() == expected
        assert figure._repr_png_() == expected


def sliced():
    return otdd.sliced_distances([some(0, 20), some(1, 25), some(2, 15)], projections=40)


@pytest.mark.parametrize("order", ["given", "hierarchical"])
def test_sliced_distances_are_a_table_that_names_draws_and_errors(order):
    result = sliced()
    figure = result.plot(order)
    error = f"{result.standard_errors.max():.2g}"
    texts = [text.get_text() for text in figure.texts]
    assert f"Sliced distances between 3 datasets, standard errors up to {error}" in texts
    (cells,) = figure.axes[0].get_images()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    places = [result.names.index(name) for name in shown]
    expected = result.values[places][:, places].numpy()
    scale = expected.max() / np.asarray(cells.get_array()).max()
    np.testing.assert_allclose(np.asarray(cells.get_array()) * scale, expected, rtol=1e-12)
    assert "mean over 40 draws" in figure.axes[1].get_ylabel()


def test_matplotlib_is_left_as_it_was_and_notebooks_show_the_figure(tmp_path):
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    theirs = pyplot.figure()
    before = dict(matplotlib.rcParams.copy()), matplotlib.get_backend()
    try:
        figure = sliced().plot()
        shown, _ = formatter.format(figure)
        assert type(figure) is Figure
        assert pyplot.get_fignums() == [theirs.number]
        assert pyplot.gcf() is theirs
        assert (dict(matplotlib.rcParams.copy()), matplotlib.get_backend()) == before
    finally:
        pyplot.close(theirs)
    (tmp_path / "shown.png").write_bytes(shown["image/png"])
    figure.savefig(tmp_path / "saved.png")
    with Image.open(tmp_path / "shown.png") as one, Image.open(tmp_path / "saved.png") as other:
        assert one.size == other.size


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: sliced().plot("best"), "unknown order 'best'; choose one of: given"),
        (lambda: pairwise().plot("best"), "unknown order 'best'; choose one of: given"),
        (lambda: flow().plot((1, 3, 3)), r"rows of 6 values are no images of shape \(1, 3, 3\)"),
        (lambda: flow().plot("1x3x2"), "image_shape must be a list of 3"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(otdd.InputError, match=message):
        draw()


def test_a_study_of_which_nothing_is_done_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = study(False)
    nothing = replace(result, readings={"frechet": {}}, done=0)
    with pytest.raises(otdd.InputError, match=f"0 of {result.total} pieces of work are done"):
        nothing.plot()
