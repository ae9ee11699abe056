"""objective.png and metrics.csv of a flow."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from flow_report_cases import record, straight_flow
from picture_checks import check_on_page

from otdd_flash.flows.history import StepRecord
from otdd_flash.report.flow.objective import draw_objective, logarithmic
from otdd_flash.report.flow.writing import write_metrics_csv


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


@pytest.fixture
def drawn(figures):
    """The axes of a history's picture."""

    def draw(history, title=""):
        draw_objective(history, "o.png", title)
        return figures[-1].axes

    return draw


def test_the_band_is_the_bounds_and_the_line_the_divergence(drawn):
    history = straight_flow(steps=4).history
    top, bounds, slope, passes = drawn(history, "a → b")
    assert band(top) == {r.step: (pytest.approx(r.lower), pytest.approx(r.upper)) for r in history}
    offsets = {r.step: (pytest.approx(-0.1), pytest.approx(0.2)) for r in history}
    assert band(bounds) == offsets
    (line,) = top.get_lines()
    assert line.get_xydata().tolist() == [[r.step, r.divergence] for r in history]
    assert slope.get_lines()[0].get_ydata().tolist() == [r.gradient_norm for r in history]
    assert passes.patches[0].get_data().values.tolist() == [r.iterations for r in history]
    assert legend(top) == [
        "dataset distance to the target: 8 → 0.5",
        "solver bounds, by themselves below",
    ]


def test_objectives_and_steps_that_did_not_converge_are_drawn_and_named(drawn):
    history = [record(k, 8.0 - k, objective=9.0 + k, functionals={"$e": 1.0}) for k in range(3)]
    top = drawn(history, "$a$")[0]
    assert top.get_lines()[1].get_ydata().tolist() == [9.0, 10.0, 11.0]
    assert legend(top)[1] == "objective: distance + $e"
    low, high = top.get_ylim()
    assert low < 5.9
    assert high > 11
    top = drawn([record(k, 8.0 - k, converged=k != 1) for k in range(4)])[0]
    (marked,) = [line for line in top.get_lines() if line.get_markerfacecolor() == "white"]
    assert marked.get_xydata().tolist() == [[1.0, 7.0]]
    assert "not converged: only the solver bounds hold" in legend(top)


@pytest.mark.slow
def test_estimates_are_dots_named_so_without_line_or_bounds(drawn):
    unknown = {"objective": None, "divergence": None, "lower": None, "upper": None}
    estimates = [
        replace(record(k, 0.0), **unknown, estimate=9.0 - k, estimated_on=1200) for k in range(3)
    ]
    top, _, slope, _ = drawn([record(0, 6.0), *estimates, record(3, 5.0)])
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
    ends = [sorted(line[:, 1]) for line in bounds.get_segments()]
    assert ends == [pytest.approx([5.9, 6.2]), pytest.approx([4.9, 5.2])]
    assert slope.get_lines()[0].get_xdata().tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_scale_suits_the_values_and_all_are_in_sight(drawn):
    for values, scale in (
        ([8.0, 4.0, 0.5], "log"),
        ([8.0, 4.0, 0.9], "linear"),
        ([8.0, 0.1, 0.0], "linear"),
        ([8.0, 0.1, -0.01], "linear"),
        ([0.0], "linear"),
    ):
        top = drawn([record(k, value) for k, value in enumerate(values)])[0]
        assert top.get_yscale() == scale, values
        assert top.get_ylabel() == f"in units of the cost, {scale} scale"
        low, high = top.get_ylim()
        assert low < min(values)
        assert max(values) < high
    # Values that are not finite choose no scale.
    assert logarithmic(np.array([np.nan, 1.0, np.inf, 10.0]))
    assert not logarithmic(np.array([np.nan]))
    # Far bounds are cut and do not flatten the curve.
    far = [record(0, 8.0, upper=1e6), record(1, 4.0, lower=-1e6)]
    far.append(record(2, 0.5, lower=-np.inf, upper=0.9))
    top = drawn(far)[0]
    low, high = top.get_ylim()
    assert 0.1 < low < 0.5
    assert 8 < high < 40
    assert band(top)[2] == (pytest.approx(0.5 / 3), 0.9)
    low, high = drawn([replace(r, divergence=r.divergence - 1) for r in far])[0].get_ylim()
    assert -6 < low < -0.5
    assert 7 < high < 14


def test_bounds_far_narrower_than_the_value_leave_ticks_without_an_offset(drawn):
    axes = drawn([record(0, 8.0, lower=8.0 - 5e-7, upper=8.0 + 5e-7)])[0]
    axes.figure.canvas.draw()
    assert axes.yaxis.get_offset_text().get_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "width"), [(1, 1e-6), (2, 0.3), (300, 1e-6)])
def test_nothing_leaves_the_page_and_a_band_is_in_sight_however_narrow(drawn, count, width):
    from matplotlib.colors import to_rgb

    history = [record(k, 8.0 * 0.9**k, gradient_norm=0.9**k) for k in range(count)]
    history = [
        replace(r, lower=r.divergence - width, upper=r.divergence + 2 * width) for r in history
    ]
    if count > 2:
        history[2] = replace(history[2], upper=1e9)
    panels = drawn(history, "a very long title " * 20)
    figure = panels[0].figure
    labels = [axes.yaxis.label for axes in panels] + [panels[-1].xaxis.label]
    check_on_page(figure, [*labels, *figure.texts])
    assert all(tick == int(tick) for tick in panels[-1].get_xticks())
    axes = panels[1]
    low, high = axes.get_ylim()
    # A solve that stopped early is cut and leaves the others a tenth of the panel and more.
    assert 3 * width / (high - low) > 0.1
    assert count < 3 or band(axes)[2][1] < high
    (drawn_band,) = axes.collections
    # Of one record it is a line.
    colors = drawn_band.get_facecolor() if count > 1 else drawn_band.get_edgecolor()
    assert to_rgb(colors[0]) != to_rgb("white")


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
