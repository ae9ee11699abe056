"""The report of a ranking: a table in the terminal, ranking.csv, ranking.html and ranking.png.

`commands.nearest` and users call `write_ranking_report`, and `commands.nearest` prints
`ranking_table`; `Ranking.plot` (`ranking.race`) calls `plot_ranking`. The table of ranking.html
shows each interval as a bar. Every name must go through `html_text` or `display`, or a form of it,
because it may contain markup. The columns of ranking.csv, the place and the fields of `Ranked`, are
read by users' scripts, so their names must stay.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.arguments import takes
from otdd_flash.errors import choose
from otdd_flash.files.atomic import write_text
from otdd_flash.report.page import (
    CONTENTS,
    SOURCE_COLOR,
    TARGET_COLOR,
    TICK_POINTS,
    Report,
    figure_of,
    fit_title,
    new_figure,
    write_each,
)
from otdd_flash.report.tables import (
    Cell,
    bar_cell,
    html_list,
    html_page,
    html_table,
    named_table,
    write_table_csv,
)
from otdd_flash.shown import display, html_text, numbers_of_interval, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from otdd_flash.ranking.race import Ranked, Ranking

# Members beyond the first k that bars are drawn of.
MORE = 10
WIDTH, HEIGHT, LONGEST = 7.6, 0.28, 32
COLUMNS = ("place", "name", "value", "lower", "upper", "proven")


@takes()
def write_ranking_report(
    ranking: Ranking, directory: str | Path, *, content: str = "full"
) -> Report:
    """Write ranking.csv and ranking.html with all members, and ranking.png with the first ones.

    Args:
        ranking: the result of `otdd.nearest`.
        directory: created if it does not exist.
        content: `none` writes nothing, `table` no picture.

    Returns:
        The files written and the files that could not be written.

    Raises:
        InputError: `content` is not one of the choices.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    choose("content", content, CONTENTS)
    if content == "none":
        return Report()
    directory, rows = Path(directory), [*ranking.rows, *ranking.others]
    columns = ("place", *type(rows[0])._fields)
    places = [*range(1, len(ranking.rows) + 1), *[None] * len(ranking.others)]
    lines = [(place, *map(_finite, row)) for place, row in zip(places, rows, strict=True)]
    return write_each(
        {
            directory / "ranking.csv": lambda path: write_table_csv(path, columns, lines),
            directory / "ranking.html": lambda path: write_text(path, _page(ranking)),
        },
        {directory / "ranking.png": lambda: _draw(ranking)} if content == "full" else {},
        [row.name for row in _shown(ranking)],
    )


def ranking_table(ranking: Ranking) -> Table:
    """Make the terminal's table of the first k."""
    rows = [
        (str(place), display(row.name), *_numbers(row), "yes" if row.proven else "no")
        for place, row in enumerate(ranking.rows, 1)
    ]
    return named_table(f"Nearest to {display(ranking.query)}", COLUMNS, rows, ("name",))


def plot_ranking(ranking: Ranking) -> Figure:
    """Draw the intervals of the first members as bars."""
    return figure_of(lambda: _draw(ranking), [row.name for row in _shown(ranking)])


def _shown(ranking: Ranking) -> list[Ranked]:
    return [*ranking.rows, *ranking.others[:MORE]]


def _finite(number: object) -> object:
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _numbers(row: Ranked) -> list[str]:
    numbers = row.value, row.lower, row.upper
    texts = numbers_of_interval(*numbers)
    return [
        text if math.isfinite(number) else "?" for number, text in zip(numbers, texts, strict=True)
    ]


def _ends(rows: list[Ranked]) -> tuple[float, float]:
    """Return the range of all finite ends, of which unbounded intervals reach the edges."""
    ends = [end for row in rows for end in (row.lower, row.upper) if math.isfinite(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.03 * (high - low) or 1.0
    return low - margin, high + margin


def _page(ranking: Ranking) -> str:
    """Return the page: sentences, and a table with a bar for each interval."""
    rows = [*ranking.rows, *ranking.others]
    low, high = _ends(rows)
    lines = []
    for place, row in enumerate(rows, 1):
        first = place <= len(ranking.rows)
        kind = "" if first else "quiet"
        left, right = (
            100 * (min(max(end, low), high) - low) / (high - low) for end in (row.lower, row.upper)
        )
        color = SOURCE_COLOR if row.proven else TARGET_COLOR if first else "#aaa"
        known = (str(place), "yes" if row.proven else "no") if first else ("", "")
        lines.append(
            [
                Cell(known[0]),
                Cell(html_text(row.name), kind=f"name {kind}"),
                *(Cell(number, kind=kind) for number in _numbers(row)),
                Cell(known[1]),
                bar_cell(left, max(right - left, 0.4), color),
            ]
        )
    title, table = f"Nearest to {ranking.query}", html_table("", [*COLUMNS, "interval"], lines)
    return html_page(title, title, [html_list(ranking.sentences()), table])


def _draw(ranking: Ranking) -> Figure:
    rows = _shown(ranking)
    low, high = _ends(rows)
    figure = new_figure(WIDTH, 1.2 + HEIGHT * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        first = place < len(ranking.rows)
        color = SOURCE_COLOR if row.proven else TARGET_COLOR if first else "0.7"
        left, right = max(row.lower, low), min(row.upper, high)
        axes.barh(place, max(right - left, (high - low) / 400), left=left, color=color)
    axes.set_yticks(range(len(rows)), [shorten(row.name, LONGEST) for row in rows])
    axes.tick_params(labelsize=TICK_POINTS)
    axes.set_xlim(low, high)
    axes.invert_yaxis()
    axes.set_xlabel("solver bounds of the distance, in units of the cost")
    axes.grid(axis="x")
    axes.set_title(fit_title(figure, f"Nearest to {display(ranking.query)}", WIDTH - 1.0))
    figure.set_layout_engine("constrained")
    return figure
