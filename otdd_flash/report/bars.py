"""A page of sentences and one table, in which every row has a bar: one file, without scripts.

`report.nearest` and `report.mixture` call it. Every text goes through `html_text`, because names of
datasets may contain markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from otdd_flash.shown import html_text

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 1rem auto;
       padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.4rem } table { border-collapse: collapse; width: 100% }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
td.name, th.name { text-align: left } tr.other { color: #666 }
td.bars { width: 40%; min-width: 8rem } svg { display: block; width: 100%; height: 1rem }
"""


class Barred(NamedTuple):
    """A row of the table.

    Attributes:
        cells: texts, one for each column.
        left: where the bar begins, in percent of its column.
        width: of the bar, likewise.
        color: of the bar.
        faint: whether the row stands behind others.
    """

    cells: Sequence[str]
    left: float
    width: float
    color: str
    faint: bool = False


def barred_page(
    title: str, sentences: Iterable[str], columns: Sequence[str], last: str, rows: Iterable[Barred]
) -> str:
    """Return the page.

    Args:
        title: of the page.
        sentences: above the table.
        columns: names of the columns; `name` and `source` are of names.
        last: name of the column of bars.
        rows: of the table.
    """
    marks = [' class="name"' if name in ("name", "source") else "" for name in columns]
    heads = "".join(f"<th{mark}>{name}</th>" for mark, name in zip(marks, columns, strict=True))
    lines = []
    for row in rows:
        cells = zip(marks, map(html_text, row.cells), strict=True)
        lines.append(
            f"<tr{' class=other' if row.faint else ''}>"
            f"{''.join(f'<td{mark}>{cell}</td>' for mark, cell in cells)}"
            f'<td class="bars"><svg><rect x="{row.left:.2f}%" y="25%" height="50%" '
            f'width="{row.width:.2f}%" fill="{row.color}"/></svg></td></tr>'
        )
    title, said = html_text(title), "".join(f"<li>{html_text(one, None)}</li>" for one in sentences)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><ul>{said}</ul>"
        f"<table><thead><tr>{heads}<th>{last}</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></body></html>\n"
    )
