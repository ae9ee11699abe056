"""Tables of reports: csv files, tables for the terminal, and pages of HTML.

The modules of `report` that write tables call it (`report.distance`, `report.nearest`,
`report.study.writing`, ...); `report.study.page`, `report.nearest` and `report.mixture` make pages.
Files are written atomically, so that nobody reads half a table. Lines of csv files end with a line
feed, so that they are the same on every system, and their numbers read back as the same float64. A
page is one file that needs no network; on narrow screens table rows become blocks of named lines.
Every text of it goes through `html_text`: names of datasets may contain markup.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from otdd_flash.files.atomic import write_text
from otdd_flash.shown import LONGEST_MESSAGE, LONGEST_NAME, csv_cell, html_text

if TYPE_CHECKING:
    from rich.table import Table


def write_matrix_csv(
    path: str | Path,
    matrix: Tensor,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    corner: str = "",
) -> None:
    """Write a matrix (R, C) with a header row and a header column, at full precision.

    Numbers are the shortest text that reads back as the same float64. Names are made safe by
    `csv_cell` (no formula of a spreadsheet, no control characters, no secrets); those with commas
    or quotes are quoted.

    Args:
        path: the csv file.
        matrix: (R, C), any real type and device.
        row_names: R names for the first column.
        column_names: C names for the first row.
        corner: the text of the first cell of the header row.

    Raises:
        ValueError: the names do not match the matrix.
        InputError: the file cannot be written.
    """
    if tuple(matrix.shape) != (len(row_names), len(column_names)):
        raise ValueError(
            f"a {tuple(matrix.shape)} matrix cannot have {len(row_names)} row names and "
            f"{len(column_names)} column names"
        )
    rows = matrix.detach().cpu().double().tolist()
    body = ([name, *row] for name, row in zip(row_names, rows, strict=True))
    write_text(path, _csv_text([[corner, *column_names], *body]))


def write_table_csv(
    path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Write rows under named columns, numbers (of Python, not of NumPy) and names as for a matrix.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, _csv_text([columns, *rows]))


def _csv_text(rows: Iterable[Sequence[Any]]) -> str:
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return sink.getvalue()


def _cell(value: Any) -> Any:
    """Convert None to "", booleans as JSON, lists to items between spaces, text by `csv_cell`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        value = " ".join(str(item) for item in value)
    return csv_cell(value) if isinstance(value, str) else value


def facts_table(
    title: str,
    distances: Iterable[tuple[str, str]],
    late: str | None,
    details: Iterable[tuple[str, str]],
) -> Table:
    """Make the terminal's table of one result, a name and a text in each row.

    It has the distances, a red row if the result did not converge, and the details.

    Args:
        title: the table's title.
        distances: names and texts at the top.
        late: what to say, in red, of a result that did not converge; None if it did.
        details: the further names and texts.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title=Text(title, style="table.title"), title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    red = [] if late is None else [("NOT CONVERGED", late)]
    for name, text in (*distances, *red, *details):
        table.add_row(name, Text(text), style="bold red" if (name, text) in red else "")
    return table


def named_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    names: Collection[str],
    notes: Iterable[str] = (),
) -> Table:
    """Make a terminal's table, in which the columns `names` stand left and numbers right."""
    from rich.table import Table
    from rich.text import Text

    caption = "\n".join(notes) or None
    table = Table(title=Text(title, style="table.title"), title_justify="left", caption=caption)
    for column in columns:
        table.add_column(column, justify="left" if column in names else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


STYLE = """
* { box-sizing: border-box }
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 74rem; margin: 1rem auto;
       padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: .5rem 0 } h2, summary { font-size: 1.1rem; font-weight: bold }
h2 { margin: 1.5rem 0 .5rem } summary { cursor: pointer; margin: .8rem 0 }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: top }
td { white-space: nowrap }
td.name, th.name { text-align: left; white-space: normal }
td.bars { width: 40%; min-width: 8rem } svg { display: block; width: 100%; height: 1rem }
tfoot td { font-weight: bold; border-bottom: 0 }
th { overflow-wrap: normal } th[data-sorts] { cursor: pointer }
small, .quiet { color: #555; font-weight: normal; white-space: normal }
.late { color: #b00; font-weight: bold } img { max-width: 100%; height: auto }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap }
"""

# On narrow screens rows are blocks, with the column's name before each cell.
STACKED = """
TABLE, TABLE tbody, TABLE tfoot, TABLE tr { display: block }
TABLE thead { display: none } TABLE tr { border-bottom: 2px solid #bbb; padding: .4rem 0 }
TABLE td { display: grid; grid-template-columns: 45% 1fr; column-gap: .5rem; border: 0;
     text-align: left; padding: .1rem 0 } TABLE td, TABLE td.name { white-space: normal }
TABLE td.bars { width: auto } TABLE td:empty { display: none }
TABLE td::before { content: attr(data-label); color: #555; font-weight: normal }
"""


for width, tables in ((600, "table"), (1100, "table.wide")):
    STYLE += f"@media (max-width: {width}px) {{{STACKED.replace('TABLE', tables)}}}\n"


# A click on a column's head sorts the rows by it; a second click reverses the order. Empty cells
# come before numbers, and numbers before text such as "?".
SCRIPT = """
for (const head of document.querySelectorAll("th[data-sorts]")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const down = head.dataset.sorts = head.dataset.sorts === "up" ? "down" : "up";
  const key = row => row.cells[place].dataset.key ?? row.cells[place].textContent;
  const number = x => x === "" ? -1e300 : isNaN(x) ? 1e300 : +x;
  const order = (a, b) => { const x = key(a), y = key(b);
    return number(x) - number(y) || x.localeCompare(y) };
  [...body.rows].sort((a, b) => down === "up" ? order(a, b) : order(b, a))
    .forEach(row => body.append(row));
};
"""


# The CSS class of cells with a bar.
BARS = "bars"


class Cell(NamedTuple):
    """A table cell: its HTML, its sort key (the text of the cell if empty), and its CSS class."""

    html: str
    key: str = ""
    kind: str = ""

    @property
    def sorts(self) -> bool:
        """Whether rows can be sorted by the cell; bars have no text."""
        return self.kind != BARS and bool(self.key or self.html)


def html_page(title: str, heading: str, parts: Iterable[str]) -> str:
    """Return a page of a title, a heading, and parts that are HTML, of which some may be empty."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title, LONGEST_MESSAGE)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{html_text(heading)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def html_list(sentences: Iterable[str]) -> str:
    """Return a list of sentences as HTML; "" if there are none."""
    items = "".join(f"<li>{html_text(one, LONGEST_MESSAGE)}</li>" for one in sentences)
    return f"<ul>{items}</ul>" if items else ""


def html_table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    foot: Sequence[Cell] = (),
    kind: str = "",
) -> str:
    """Return a table as HTML, "" if it has no rows; a click on a head sorts it if cells have keys.

    Args:
        title: above the table; "" for none.
        heads: names of the columns.
        rows: their cells.
        foot: the cells of a last row, which stays where it is.
        kind: the CSS class of the table; "wide" for one of many columns.
    """
    if not rows:
        return ""
    head = ""
    for one, column in zip(heads, zip(*rows, strict=True), strict=True):
        sorts = ' data-sorts=""' if any(cell.sorts for cell in column) else ""
        left = "name" if column[0].kind.startswith("name") else ""
        head += f"<th{sorts}{_class(left)}>{html_text(one)}</th>"
    body = "".join(_row(heads, row) for row in rows)
    end = f"<tfoot>{_row(heads, foot)}</tfoot>" if foot else ""
    heading = f"<h2>{html_text(title)}</h2>" if title else ""
    return (
        f"{heading}<table{_class(kind)}><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody>{end}</table>"
    )


def _row(heads: Sequence[str], cells: Sequence[Cell]) -> str:
    text = ""
    for head, (html, key, kind) in zip(heads, cells, strict=True):
        sorts = f' data-key="{key}"' if key not in ("", html) else ""
        shown = f"<span>{html}</span>" if html else ""
        text += f'<td data-label="{html_text(head)}"{sorts}{_class(kind)}>{shown}</td>'
    return f"<tr>{text}</tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def value_cell(value: object, kind: str = "") -> Cell:
    """Return the cell of a number or of None, which is empty."""
    if isinstance(value, float):
        return Cell(f"{value:.4g}", repr(value), kind)
    text = "" if value is None else html_text(value)
    return Cell(text, text, kind)


def name_cell(text: str, limit: int = LONGEST_NAME) -> Cell:
    """Return the cell of a text, with at most `limit` characters."""
    shown = html_text(text, limit)
    return Cell(shown, shown, "name")


def bar_cell(left: float, width: float, color: str) -> Cell:
    """Return a cell with a bar, its left end and width in percent of the column's width."""
    bar = f'<rect x="{left:.2f}%" y="25%" height="50%" width="{width:.2f}%" fill="{color}"/>'
    return Cell(f"<svg>{bar}</svg>", kind=BARS)
