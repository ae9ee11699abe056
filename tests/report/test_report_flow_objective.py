import csv
from dataclasses import replace

import numpy as np
import pytest
from flow_report_cases import record, straight_flow
from matplotlib.colors import to_rgb
from PIL import Image

from otdd_flash.flows.history import StepRecord
from otdd_flash.report.flow import objective as flow_objective
from otdd_flash.report.flow.metrics import write_metrics_csv
from otdd_flash.report.flow.objective import draw_objective, logarithmic


@pytest.fixture
def figures(monkeypatch):
    saved = []
    save = flow_objective.save_picture

    def keep(figure, path):
        save(figure, path)
        saved.append(figure)

    monkeypatch.setattr(flow_objective, "save_picture", keep)
    return saved


def band(axes):
    """The lower and upper end of the band at every step."""
    (collection,) = axes.collections
    corners = collection.get_paths()[0].vertices
    return {
        float(x): (corners[corners[:, 0] == x, 1].min(), corners[corners[:, 0] == x, 1].max())
        for x in np.unique(corners[:, 0])
    }


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_band_is_the_bounds_and_the_line_the_divergence(figures, tmp_path):
    history = straight_flow(steps=4).history
    draw_objective(history, tmp_path / "o.png", "a → b")
    top, bounds, slope, work = figures[0].axes
    assert band(top) == {r.step: (pytest.approx(r.lower), pytest.approx(r.upper)) for r in history}
    offsets = {r.step: (pytest.approx(-0.1), pytest.approx(0.2)) for r in history}
    assert band(bounds) == offsets
    (line,) = top.get_lines()
    assert line.get_xydata().tolist() == [[r.step, r.divergence] for r in history]
    assert slope.get_lines()[0].get_ydata().tolist() == [r.gradient_norm for r in history]
    assert work.patches[0].get_data().values.tolist() == [r.iterations for r in history]
    assert legend(top) == [
        "dataset distance to the target: 8 → 0.5",
        "solver bounds, by themselves below",
    ]
    with Image.open(tmp_path / "o.png") as image:
        image.verify()


def test_with_functionals_the_objective_is_drawn_and_named(figures, tmp_path):
    history = [record(k, 8.0 - k, objective=9.0 + k, functionals={"$e": 1.0}) for k in range(3)]
    draw_objective(history, tmp_path / "o.png", "$a$")
    top = figures[0].axes[0]
    assert top.get_lines()[1].get_ydata().tolist() == [9.0, 10.0, 11.0]
    assert legend(top)[1] == "objective: distance + $e"
    low, high = top.get_ylim()
    assert low < 5.9
    assert high > 11


def test_estimates_are_dots_named_so_without_line_or_bounds(figures, tmp_path):
    unknown = {"objective": None, "divergence": None, "lower": None, "upper": None}
    estimates = [
        replace(record(k, 0.0), **unknown, estimate=9.0 - k, estimated_on=1200) for k in range(3)
    ]
    draw_objective([record(0, 6.0), *estimates, record(3, 5.0)], tmp_path / "o.png", "")
    top, _, slope, _ = figures[0].axes
    whole, dots = top.get_lines()
    assert whole.get_xydata().tolist() == [[0, 6.0], [3, 5.0]]
    assert dots.get_xydata().tolist() == [[0, 9.0], [1, 8.0], [2, 7.0]]
    assert {whole.get_linestyle(), dots.get_linestyle()} == {"None"}
    assert legend(top) == [
        "dataset distance to the target: 6 → 5",
        "estimates on 1,200 points",
        "solver bounds, by themselves below",
    ]
    (bounds,) = top.collections
    assert [sorted(line[:, 1]) for line in bounds.get_segments()] == [
        pytest.approx([5.9, 6.2]),
        pytest.approx([4.9, 5.2]),
    ]
    assert slope.get_lines()[0].get_xdata().tolist() == [0, 1, 2, 3]


def test_steps_that_did_not_converge_are_marked(figures, tmp_path):
    history = [record(k, 8.0 - k, converged=k != 1) for k in range(4)]
    draw_objective(history, tmp_path / "o.png", "")
    top = figures[0].axes[0]
    (marked,) = [line for line in top.get_lines() if line.get_markerfacecolor() == "white"]
    assert marked.get_xydata().tolist() == [[1.0, 7.0]]
    assert "not converged: only the solver bounds hold" in legend(top)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([8.0, 4.0, 0.5], "log"),
        ([8.0, 4.0, 0.9], "linear"),
        ([8.0, 0.1, 0.0], "linear"),
        ([8.0, 0.1, -0.01], "linear"),
        ([0.0], "linear"),
    ],
)
def test_the_scale_suits_the_values_and_all_are_in_sight(figures, tmp_path, values, scale):
    history = [record(k, value) for k, value in enumerate(values)]
    draw_objective(history, tmp_path / "o.png", "")
    top = figures[0].axes[0]
    assert top.get_yscale() == scale
    low, high = top.get_ylim()
    assert low < min(values)
    assert max(values) < high


def test_far_bounds_are_cut_and_do_not_flatten_the_curve(figures, tmp_path):
    far = [
        record(0, 8.0, upper=1e6),
        record(1, 4.0, lower=-1e6),
        record(2, 0.5, lower=-np.inf, upper=0.9),
    ]
    draw_objective(far, tmp_path / "o.png", "")
    low, high = figures[0].axes[0].get_ylim()
    assert 0.1 < low < 0.5
    assert 8 < high < 40
    assert band(figures[0].axes[0])[2] == (pytest.approx(0.5 / 3), 0.9)
    draw_objective([replace(r, divergence=r.divergence - 1) for r in far], tmp_path / "o.png", "")
    low, high = figures[1].axes[0].get_ylim()
    assert -6 < low < -0.5
    assert 7 < high < 14


@pytest.mark.parametrize("width", [1e-6, 1e-3, 0.3])
def test_the_band_is_in_sight_however_narrow(figures, tmp_path, width):
    history = [
        replace(r, lower=r.divergence - width, upper=r.divergence + 2 * width)
        for r in straight_flow(steps=4).history
    ]
    history[2] = replace(history[2], upper=1e9)
    draw_objective(history, tmp_path / "o.png", "")
    axes = figures[0].axes[1]
    low, high = axes.get_ylim()
    # A solve that stopped early is cut and leaves the others a tenth of the panel and more.
    assert 3 * width / (high - low) > 0.1
    assert band(axes)[2][1] < high
    assert to_rgb(axes.collections[0].get_facecolor()[0]) != to_rgb("white")


@pytest.mark.parametrize(("values", "scale"), [((8.0, 0.5), "log"), ((8.0, 4.0), "linear")])
def test_the_axis_names_unit_and_scale(figures, tmp_path, values, scale):
    draw_objective([record(k, value) for k, value in enumerate(values)], tmp_path / "o.png", "")
    assert figures[0].axes[0].get_ylabel() == f"in units of the cost, {scale} scale"


def test_values_that_are_not_finite_choose_no_scale():
    assert logarithmic(np.array([np.nan, 1.0, np.inf, 10.0]))
    assert not logarithmic(np.array([np.nan]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 300])
def test_nothing_leaves_the_page(figures, tmp_path, count):
    history = [record(k, 8.0 * 0.9**k, gradient_norm=0.9**k) for k in range(count)]
    draw_objective(history, tmp_path / "o.png", "a very long title " * 20)
    (figure,) = figures
    width, height = figure.get_size_inches() * figure.dpi
    labels = [axes.yaxis.label for axes in figure.axes] + [figure.axes[-1].xaxis.label]
    for text in [*labels, *figure.texts]:
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= width
        assert box.y1 <= height
    assert all(tick == int(tick) for tick in figure.axes[-1].get_xticks())


def test_metrics_have_a_line_per_step_and_a_column_per_functional(tmp_path):
    history = [
        record(0, 1 / 3, functionals={"entropy, e": -1.5}),
        record(1, 0.25, functionals={"potential": 2.0}, converged=False),
    ]
    write_metrics_csv(history, tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as lines:
        first, second = csv.DictReader(lines)
    shared = [name for name in StepRecord.__dataclass_fields__ if name != "functionals"]
    assert list(first) == [*shared, "functional.entropy, e", "functional.potential"]
    assert float(first["divergence"]) == 1 / 3
    assert (first["functional.entropy, e"], first["functional.potential"]) == ("-1.5", "")
    assert (second["functional.entropy, e"], second["functional.potential"]) == ("", "2.0")
    assert (second["step"], second["converged"], second["iterations"]) == ("1", "false", "11")
