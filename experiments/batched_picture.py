"""The sweep over small matrices as one picture of four panels.

Time, bandwidth and speed-up of 4 x 4 over the number of matrices, with bands from the 1% to the 99%
quantile; and time over the size of matrices at as many entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.report.page import INK, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
# Of Okabe & Ito, told apart with every common colour blindness; markers tell as well.
STYLES = {
    "ours, in a graph": ("#0072B2", "o", "-"),
    "ours": ("#0072B2", "o", "--"),
    "torch.compile": ("#D55E00", "s", "-"),
    "loop": ("#E69F00", "D", "-"),
    "liger-kernel": ("#009E73", "^", "-"),
    "POT": ("#CC79A7", "v", "-"),
    "OTT-JAX": ("#56B4E9", "P", "-"),
    "pygmtools": ("#999999", "X", "-"),
    "geomloss": ("#000000", "*", "-"),
}
REFERENCE = "torch.compile"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of forward rows."""
    lines = [line for row in rows if not row["backward"] for line in _lines(row)]
    small = [line for line in lines if line["n"] == 4 and line["iterations"] == 20]
    alike: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line["iterations"] == 20:
            alike.setdefault(line["B"] * line["n"] ** 2, []).append(line)
    # As many entries as the most sizes have.
    large = max(alike, key=lambda entries: len({line["n"] for line in alike[entries]}), default=0)
    sizes = alike.get(large, [])
    figure = new_figure(11.0, 8.2)
    time, bandwidth, speed, size = figure.subplots(2, 2).flat
    reference = {line["B"]: line["ms"] for line in small if line["name"] == REFERENCE}
    compared = [line for line in small if line["B"] in reference and line["name"] != REFERENCE]
    _panel(time, small, "B", lambda line, key: line[key])
    _panel(bandwidth, small, "B", lambda line, key: _gigabytes(line, line[key]))
    _panel(speed, compared, "B", lambda line, key: reference[line["B"]] / line[key])
    _panel(size, sizes, "n", lambda line, key: line[key])
    titles = (
        (time, "Time of 4 x 4, 20 iterations", "ms", "matrices"),
        (bandwidth, "Bandwidth of input and output", "GB/s", "matrices"),
        (speed, f"Speed-up over {REFERENCE}", "times", "matrices"),
        (size, f"Time of {large:,} entries, 20 iterations", "ms", "rows of a matrix"),
    )
    for axes, title, unit, what in titles:
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_ylabel(unit)
        axes.set_xlabel(what)
        axes.grid(alpha=0.25)
    handles, names = time.get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=9.5)
    figure.subplots_adjust(0.08, 0.15, 0.98, 0.95, hspace=0.32, wspace=0.2)
    save_picture(figure, path)


def _lines(row: Row) -> list[Row]:
    """A row as it is called and, where it was, in a graph."""
    keys = {key: row[key] for key in ("n", "B", "iterations")}
    found = [("called", row["method"]), ("in_graph", f"{row['method']}, in a graph")]
    return [{**keys, **row[how], "name": name} for how, name in found if how in row]


def _gigabytes(line: Row, milliseconds: float) -> float:
    """Those of float32 in and out, each second."""
    return float(2 * 4 * line["B"] * line["n"] ** 2 / milliseconds / 1e6)


def _panel(axes: Axes, lines: Sequence[Row], x: str, value: Callable[[Row, str], float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, (color, marker, style) in STYLES.items():
        mine = sorted((line for line in lines if line["name"] == name), key=lambda line: line[x])
        if not mine:
            continue
        places = [line[x] for line in mine]
        axes.plot(
            places, [value(line, "ms") for line in mine], style, color=color, marker=marker,
            markersize=5, linewidth=1.4, label=name,
        )  # fmt: skip
        low, high = ([value(line, key) for line in mine] for key in ("ms_1%", "ms_99%"))
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
