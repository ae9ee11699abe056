"""The report of a mixture: a table, mixture.csv, mixture.html, mixture.png and rows to train on.

`commands.mix` and users call `write_mixture_report`, and `commands.mix` prints `mixture_table`;
`Mixture.plot` (`mixing.result`) calls `plot_mixture`. Every name must go through `html_text` or
`display`, or a form of it, because it may contain markup. The columns of mixture.csv are read by
users' scripts, so their names must stay (`tests/commands/test_mix_command.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.arguments import takes
from otdd_flash.data.writing import write_hugging_face, write_npz
from otdd_flash.errors import choose
from otdd_flash.files.atomic import write_text
from otdd_flash.report.page import (
    CONTENTS,
    SOURCE_COLOR,
    TARGET_COLOR,
    TICK_POINTS,
    Pictures,
    Report,
    Writers,
    figure_of,
    fit_title,
    new_figure,
    write_each,
)
from otdd_flash.report.tables import (
    bar_cell,
    html_list,
    html_page,
    html_table,
    name_cell,
    named_table,
    value_cell,
    write_table_csv,
)
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from otdd_flash.data.writing import ImageShape
    from otdd_flash.mixing.result import Mixture

COLUMNS = ("source", "weight", "lower", "upper", "marginal_cost", "limit", "rows")
# Sources that are drawn, the heaviest, and the size of a picture.
MOST_BARS, WIDTH, HEIGHT, LONGEST = 40, 7.6, 0.28, 32


@takes()
def write_mixture_report(
    mixture: Mixture,
    directory: str | Path,
    *,
    other: Mixture | None = None,
    content: str = "full",
    drawn: LabeledSamples | None = None,
    image_shape: ImageShape | None = None,
) -> Report:
    """Write mixture.csv and mixture.html, mixture.png, and the rows that were drawn.

    Args:
        mixture: the result of `otdd.mixture`.
        directory: created if it does not exist.
        other: another mixture of the same sources, whose weights the page has beside.
        content: `none` writes no table or picture, `table` no picture.
        drawn: `mixture.dataset(...)`, written as mixture.npz and the folder mixture.
        image_shape: (c, h, w) if features are the pixels of images.

    Returns:
        The files written and the files that could not be written.

    Raises:
        InputError: `content` is not one of the choices.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    choose("content", content, CONTENTS)
    directory = Path(directory)
    writers: Writers = {}
    pictures: Pictures = {}
    if drawn is not None:
        writers |= {
            directory / "mixture.npz": lambda path: write_npz(drawn, path),
            directory / "mixture": lambda path: write_hugging_face(drawn, path, image_shape),
        }
    if content != "none":
        writers |= {
            directory / "mixture.csv": lambda path: write_table_csv(path, COLUMNS, _rows(mixture)),
            directory / "mixture.html": lambda path: write_text(path, _page(mixture, other)),
        }
    if content == "full":
        pictures[directory / "mixture.png"] = lambda: _draw(mixture)
    return write_each(writers, pictures, list(mixture.weights))


def mixture_table(mixture: Mixture, other: Mixture | None = None) -> Table:
    """Make the terminal's table, with the weights of another mixture of the same sources beside."""
    heads, lines = _cells(mixture, other)
    rows = [(display(name), *cells) for name, *cells in lines]
    return named_table(f"Mixture for {display(mixture.target)}", heads, rows, ("source",))


def _cells(mixture: Mixture, other: Mixture | None) -> tuple[list[str], list[list[str]]]:
    """Return the heads of a table, and its lines, the heaviest source first."""
    each = [mixture, *([] if other is None else [other])]
    interval = [] if mixture.intervals is None else ["95% interval"]
    weights = ["debiased weight" if one.debias else "weight" for one in each]
    heads = ["source", *weights, *interval, "marginal cost", "rows"]
    lines = []
    for name, _ in sorted(mixture.weights.items(), key=lambda item: -item[1]):
        cells = [name, *(f"{one.weights[name]:.4f}" for one in each)]
        if mixture.intervals is not None:
            cells.append("[{:.3f}, {:.3f}]".format(*mixture.intervals[name]))
        lines.append([*cells, f"{mixture.marginal_costs[name]:+.3g}", str(mixture.sizes[name])])
    return heads, lines


def plot_mixture(mixture: Mixture) -> Figure:
    """Draw weights and marginal costs as bars."""
    return figure_of(lambda: _draw(mixture), list(mixture.weights))


def _rows(mixture: Mixture) -> list[tuple[object, ...]]:
    """Return the rows of mixture.csv, in the order of the sources."""
    ends = mixture.intervals or {}
    return [
        (
            *(name, weight, *ends.get(name, (None, None)), mixture.marginal_costs[name]),
            *(mixture.limits[name], mixture.sizes[name]),
        )
        for name, weight in mixture.weights.items()
    ]


def _page(mixture: Mixture, other: Mixture | None) -> str:
    """Return the page: sentences, and the table with bars of the weights."""
    heads, lines = _cells(mixture, other)
    rows = [
        [
            name_cell(name),
            *map(value_cell, cells),
            bar_cell(0, 100 * mixture.weights[name], SOURCE_COLOR),
        ]
        for name, *cells in lines
    ]
    title, table = f"Mixture for {mixture.target}", html_table("", [*heads, ""], rows)
    return html_page(title, title, [html_list(mixture.sentences()), table])


def _draw(mixture: Mixture) -> Figure:
    heaviest = sorted(mixture.weights.items(), key=lambda item: -item[1])[:MOST_BARS]
    names = [name for name, _ in heaviest]
    figure = new_figure(WIDTH, 1.2 + HEIGHT * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(names))
    left.barh(places, [weight for _, weight in heaviest], color=SOURCE_COLOR)
    if mixture.intervals is not None:
        for place, name in enumerate(names):
            left.plot(mixture.intervals[name], [place, place], color="0.2", linewidth=1)
    right.barh(places, [mixture.marginal_costs[name] for name in names], color=TARGET_COLOR)
    left.set_yticks(places, [shorten(name, LONGEST) for name in names])
    left.invert_yaxis()
    left.set_xlabel("weight")
    right.set_xlabel("marginal cost a unit of weight")
    # Small numbers are long.
    right.locator_params(axis="x", nbins=4)
    for axes in (left, right):
        axes.tick_params(labelsize=TICK_POINTS)
        axes.grid(axis="x")
    title = f"Mixture for {display(mixture.target)}"
    figure.suptitle(fit_title(figure, title, WIDTH - 1.0))
    figure.set_layout_engine("constrained")
    return figure
