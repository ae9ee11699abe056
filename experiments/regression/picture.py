"""One descent: loss, gradient norm and smallest eigenvalue against steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.regression.descent import LEAST_EIGENVALUE, SMALL_GRADIENT
from otdd_flash.report.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    new_figure,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart with every common colour blindness, and by dots, which Newton alone has.
COLORS = {"a": SOURCE_COLOR, "n": TARGET_COLOR}
LABELS = {"a": "Adam", "n": "Newton"}
GUIDE = "#777777"
TITLE = "Shuffled regression, {cells:,} cells, ε = {epsilon:g}, start {seed}"


def draw_descent(row: dict[str, Any], path: Path) -> None:
    """Write the picture of a row."""
    trace = row["trace"]
    modes = trace["modes"]
    figure = new_figure(7.5, 8.0)
    panels = figure.subplots(3, 1, sharex=True)
    steps = range(len(trace["loss"]))
    _curve(panels[0], modes, steps, trace["loss"])
    panels[0].set_ylabel("loss")
    _curve(panels[1], modes, steps, trace["gradient_norm"])
    panels[1].set_yscale("log")
    panels[1].set_ylabel("gradient norm")
    _guide(panels[1], SMALL_GRADIENT, f"end: {SMALL_GRADIENT:g}, three times")
    checked = trace["checks"]
    panels[2].plot(checked, trace["eigenvalue"], color=INK, linewidth=1, zorder=1)
    for mode, color in COLORS.items():
        seen = [place for place, step in enumerate(checked) if modes[step] == mode]
        along = [checked[place] for place in seen], [trace["eigenvalue"][place] for place in seen]
        panels[2].plot(*along, "o", color=color, markersize=4)
    panels[2].set_yscale("symlog", linthresh=0.01, linscale=0.5)
    panels[2].set_ylabel("smallest eigenvalue")
    panels[2].set_xlabel("step")
    _guide(panels[2], LEAST_EIGENVALUE, f"Newton: at least {LEAST_EIGENVALUE:g}")
    for axes in panels:
        _mark_escapes(axes, trace["escapes"])
    panels[0].set_title(TITLE.format(**row), loc="left", pad=26, fontsize=11, color=INK)
    # Above the curves: escapes may be at any step.
    place = (-0.02, 0.97)
    panels[0].legend(loc="lower left", bbox_to_anchor=place, ncols=3, frameon=False, fontsize=10)
    figure.subplots_adjust(0.12, 0.07, 0.97, 0.92, hspace=0.12)
    save_picture(figure, path)


def _curve(axes: Axes, modes: str, steps: Sequence[int], values: Sequence[float]) -> None:
    """A line in pieces, each in the colour of the method whose steps it shows."""
    labelled = set()
    for mode, places in groupby(range(len(modes) - 1), key=modes.__getitem__):
        drawn = list(places)
        part = slice(drawn[0], drawn[-1] + 2)
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if mode == "n" else {}
        label = None if mode in labelled else LABELS[mode]
        labelled.add(mode)
        axes.plot(
            steps[part], values[part], color=COLORS[mode], linewidth=1.6, label=label, **style
        )


def _guide(axes: Axes, height: float, text: str) -> None:
    axes.axhline(height, color=GUIDE, linewidth=1, linestyle=":")
    place = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=place, va="bottom", fontsize=9, color=GUIDE)


def _mark_escapes(axes: Axes, escapes: Sequence[int]) -> None:
    for turn, step in enumerate(escapes):
        label = "escape" if turn == 0 else None
        axes.axvline(step, color=INK, linewidth=1, linestyle="--", label=label, zorder=0)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
