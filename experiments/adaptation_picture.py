"""Accuracies before and after adaptation: a panel a direction, a group a pair, a bar a flow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.report.page import INK, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito: told apart with every common colour blindness.
COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")
DARK = ("#0072B2", "#D55E00", "#009E73")
BEFORE, CEILING = "#999999", INK
TITLES = {
    "on_source": "Trained on the target, tested on the source",
    "on_target": "Trained on the source, tested on the target",
}
NAMES = {"mnist": "MNIST", "usps": "USPS", "fashion_mnist": "Fashion-MNIST"}


def draw_adaptation(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture of these rows: means over seeds, each seed a dot."""
    pairs = list(dict.fromkeys((row["source"], row["target"]) for row in rows))
    flows = list(dict.fromkeys(row["flow"] for row in rows))
    figure = new_figure(11.0, 7.6)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (key, title) in zip(panels, TITLES.items(), strict=True):
        _panel(axes, rows, key, pairs, flows)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_ylabel("accuracy, %")
    labels = [f"{NAMES[source]} → {NAMES[target]}" for source, target in pairs]
    panels[-1].set_xticks(range(len(pairs)), labels, fontsize=11)
    handles, names = panels[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False, fontsize=9.5)
    figure.subplots_adjust(0.07, 0.16, 0.98, 0.94, hspace=0.22)
    save_picture(figure, path)


def _panel(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    key: str,
    pairs: Sequence[tuple[str, str]],
    flows: Sequence[str],
) -> None:
    width = 0.8 / (len(flows) + 1)
    for group, pair in enumerate(pairs):
        seen = [row for row in rows if (row["source"], row["target"]) == pair]
        by_flow = {flow: [row for row in seen if row["flow"] == flow] for flow in flows}
        bars = [("before", BEFORE, [row["before"][key] for row in by_flow[flows[0]]])]
        bars += [
            (flow, color, [row["after"][key] for row in found])
            for color, (flow, found) in zip(COLORS, by_flow.items(), strict=False)
        ]
        for place, (name, color, values) in enumerate(bars):
            x = group + (place - len(flows) / 2) * width
            label = name if group == 0 else None
            mean = statistics.fmean(values)
            axes.bar(x, mean, 0.92 * width, color=color, label=label)
            axes.plot([x] * len(values), values, "o", color=INK, markersize=2.5)
            # In the bar, where neither dots nor the ceiling are in the way.
            ink = "white" if color in DARK else INK
            axes.text(x, 2.5, f"{mean:.0f}", ha="center", fontsize=9, color=ink, weight="bold")
        if key == "on_target":
            ceiling = statistics.fmean(row["ceiling"] for row in seen)
            label = "trained on the target" if group == 0 else None
            ends = group - 0.45, group + 0.45
            axes.plot(ends, [ceiling] * 2, "--", color=CEILING, linewidth=1, label=label)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
