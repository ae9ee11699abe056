"""What `plot` of a result gives: the report's main picture, and no trace in matplotlib."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from small_tasks import small_study

import otdd_flash as otdd
from otdd_flash.report.distance import write_report
from otdd_flash.report.flow import write_flow_report
from otdd_flash.report.pairwise import write_pairwise_report
from otdd_flash.report.study.writing import write_study_report

IMAGES = {"image_shape": (1, 3, 2)}


def some(seed, rows, classes=3):
    draw = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    features = draw.random((rows, 6)) / 2 + labels[:, None] / 6
    return otdd.LabeledSamples.from_arrays(features, labels, name=f"set $_{seed}")


@pytest.fixture(scope="module")
def result_of(tmp_path_factory):
    """A result of each kind, made once."""
    one, two, three = some(0, 20), some(1, 25), some(2, 15)
    alone = {"measures": ["frechet"], "transfer": None}
    folder = tmp_path_factory.mktemp("studies")
    made = {
        "distance": lambda: otdd.dataset_distance(one, two, epsilon=1.0),
        "pairwise": lambda: otdd.pairwise_distances([one, two, three], epsilon=1.0),
        "flow": lambda: otdd.gradient_flow(one, two, otdd.Flow(steps=1), epsilon=1.0),
        "sliced": lambda: otdd.sliced_distances([one, two, three], projections=40),
        "study": lambda: small_study(measures=["frechet"]).run(folder / "a", threads=1),
        "distances": lambda: small_study(2, **alone).run(folder / "b", threads=1),
    }
    return cache(lambda kind: made[kind]())


# What writes the report of a result, its class where it can be loaded, and the pictures that
# reports lead with, by the options of `plot`.
KINDS = {
    "distance": (write_report, otdd.DistanceResult, {"projection": {}}),
    "pairwise": (write_pairwise_report, otdd.PairwiseResult, {"distances": {}}),
    "flow": (write_flow_report, otdd.FlowResult, {"objective": {}, "images": IMAGES}),
    "study": (write_study_report, None, {"gains_against_frechet": {}}),
    "distances": (write_study_report, None, {"distances": {}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_picture_that_the_report_leads_with(kind, tmp_path, result_of):
    """Byte for byte, also of a result that was saved, and whatever style the user has."""
    import matplotlib

    write, loaded, pictures = KINDS[kind]
    result = result_of(kind)
    write(result, tmp_path / "report", **(IMAGES if kind == "flow" else {}))
    if loaded:
        result = loaded.load(result.save(tmp_path / "saved"))
    for name, options in pictures.items():
        expected = (tmp_path / "report" / f"{name}.png").read_bytes()
        with matplotlib.rc_context({"text.usetex": True, "font.size": 30.0}):
            figure = result.plot(**options)
            # First: what is drawn later than the figure must not take their style.
            figure.savefig(tmp_path / "saved.png")
            assert (tmp_path / "saved.png").read_bytes() == expected, name
            assert figure._repr_png_() == expected, name


def test_sliced_distances_are_a_table_that_names_draws_and_errors(result_of):
    result = result_of("sliced")
    error = f"{result.standard_errors.max():.2g}"
    for order in ("given", "hierarchical"):
        figure = result.plot(order)
        texts = [text.get_text() for text in figure.texts]
        assert f"Sliced distances between 3 datasets, standard errors up to {error}" in texts
        (cells,) = figure.axes[0].get_images()
        shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        places = [result.names.index(name) for name in shown]
        expected = result.values[places][:, places].numpy()
        drawn = np.asarray(cells.get_array())
        np.testing.assert_allclose(drawn * expected.max() / drawn.max(), expected, rtol=1e-12)
        assert "mean over 40 draws" in figure.axes[1].get_ylabel()


@pytest.mark.slow
def test_matplotlib_is_left_as_it_was_and_notebooks_show_the_figure(result_of):
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    theirs = pyplot.figure()
    before = dict(matplotlib.rcParams.copy()), matplotlib.get_backend()
    try:
        figure = result_of("sliced").plot()
        shown, _ = formatter.format(figure)
        assert type(figure) is Figure
        assert shown["image/png"] == figure._repr_png_()
        assert pyplot.get_fignums() == [theirs.number]
        assert (dict(matplotlib.rcParams.copy()), matplotlib.get_backend()) == before
    finally:
        pyplot.close(theirs)


@pytest.mark.slow
def test_what_cannot_be_drawn_is_refused(result_of):
    order = "unknown order 'best'; choose one of: given"
    for kind, given, message in (
        ("sliced", "best", order),
        ("pairwise", "best", order),
        ("flow", (1, 3, 3), r"rows of 6 values are no images of shape \(1, 3, 3\)"),
        ("flow", "1x3x2", "image_shape must be a list of 3"),
    ):
        with pytest.raises(otdd.InputError, match=message):
            result_of(kind).plot(given)
    result = result_of("distances")
    nothing = replace(result, readings={"frechet": {}}, done=0)
    with pytest.raises(otdd.InputError, match=f"0 of {result.total} pieces of work are done"):
        nothing.plot()
