"""report.html: all of a study in one file, without network, readable without scripts."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from otdd_flash.files.atomic import write_text
from otdd_flash.report.study.sentences import findings_sentences
from otdd_flash.shown import LONGEST_MESSAGE, LONGEST_NAME, html_text, listing
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.result import StudyResult, TransferredPair
from otdd_flash.study.statistics.pairs import Numbers

NEAREST = 3

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child, td.name { text-align: left }
th[data-sorts] { cursor: pointer } .late { color: #b00; font-weight: bold }
img { max-width: 100% } pre { background: #f6f6f6; padding: 1rem; overflow: auto }
"""

# Sorts the rows of a table by the column whose head is clicked; again, the other way.
SCRIPT = """
for (const head of document.querySelectorAll("th[data-sorts]")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const down = head.dataset.sorts = head.dataset.sorts === "up" ? "down" : "up";
  const key = row => row.cells[place].dataset.key ?? row.cells[place].textContent;
  const order = (a, b) => { const x = key(a), y = key(b);
    return (x === "" ? -1e300 : isNaN(x) ? 0 : +x) - (y === "" ? -1e300 : isNaN(y) ? 0 : +y)
      || x.localeCompare(y) };
  [...body.rows].sort((a, b) => down === "up" ? order(a, b) : order(b, a))
    .forEach(row => body.append(row));
};
"""


def write_page(result: StudyResult, pictures: Mapping[str, Path], path: Path) -> None:
    """Write the page.

    Args:
        result: what is told.
        pictures: files by their captions; those that are not there are left out.
        path: of the page.

    Raises:
        InputError: it cannot be written.
    """
    parts = [
        f"<h1>Study of {len(result.names)} tasks</h1>",
        _list(findings_sentences(result)),
        "" if not result.notes() else "<h2>Left out</h2>" + _list(result.notes()),
        *(_picture(caption, file) for caption, file in pictures.items() if file.exists()),
        _statistics(result),
        _nearest(result),
        _pairs(result),
        _about(result),
    ]
    title = html_text(f"Study of {listing(result.names)}", LONGEST_MESSAGE)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )
    write_text(path, text)


def _list(sentences: Iterable[str]) -> str:
    items = (f"<li>{html_text(sentence, LONGEST_MESSAGE)}</li>" for sentence in sentences)
    return f"<ul>{''.join(items)}</ul>"


def _picture(caption: str, file: Path) -> str:
    content = b64encode(file.read_bytes()).decode()
    return (
        f'<h2>{html_text(caption)}</h2><img alt="{html_text(caption)}" '
        f'src="data:image/png;base64,{content}">'
    )


def _statistics(result: StudyResult) -> str:
    columns = ("measure", "statistic", "value", "lower", "upper", "p", "units", "pairs", "note")
    rows = [[_cell(getattr(row, column)) for column in columns] for row in result.correlations()]
    return _table("What the pairs say", columns, rows) if rows else ""


def _pairs(result: StudyResult) -> str:
    """One row per ordered pair: every measure, and the gain."""
    measures = [name for name, found in result.readings.items() if found]
    transfers = {(row.source, row.target): row for row in result.transfers()}
    rows = []
    for i, j in result.setup.ordered_pairs():
        names = result.names[i], result.names[j]
        cells = [_name(name) for name in names]
        for measure in measures:
            reading = result.readings[measure].get((i, j))
            late = "" if reading is None or reading.converged else ' class="late"'
            value = np.nan if reading is None else reading.value
            cells.append(_cell(value if np.isfinite(value) else None, late))
        if transfers:
            cells += _gain(transfers.get(names))
        rows.append(cells)
    heads = ["source", "target", *(MEASURES[measure].title for measure in measures)]
    heads += ["gain, %", "±", "error alone, %", "transferred, %"] if transfers else []
    return _table("All ordered pairs", heads, rows)


def _gain(row: TransferredPair | None) -> list[str]:
    if row is None:
        return [_cell(None)] * 4
    return [_cell(part) for part in (row.gain, row.gain_error, row.alone, row.transferred)]


def _nearest(result: StudyResult) -> str:
    """For every target the sources that a measure puts first."""
    rows = []
    for j, target in enumerate(result.names):
        for measure, found in result.readings.items():
            scores = result.oriented(measure)[:, j]
            sources = [i for i, k in found if k == j and np.isfinite(scores[i])]
            if sources:
                near = _first(result.names, sources, scores)
                title = MEASURES[measure].title
                rows.append([_name(target), _name(title), _name(near, LONGEST_MESSAGE)])
    return _table("Nearest sources", ("target", "by", "sources, the nearest first"), rows)


def _first(names: Sequence[str], sources: Iterable[int], scores: Numbers) -> str:
    """Name the first sources, with = between those that are tied."""
    order = sorted(sources, key=lambda i: (-scores[i], i))
    if len(order) > 1 and scores[order[0]] == scores[order[-1]]:
        return "the same for all sources"
    text = names[order[0]]
    for place, (one, other) in enumerate(pairwise(order), 1):
        tied = scores[one] == scores[other]
        if place >= NEAREST:
            return text + (" = ..." if tied else "")
        text += (" = " if tied else ", ") + names[other]
    return text


def _about(result: StudyResult) -> str:
    lines = json.dumps(result.setup.summary(), indent=1, ensure_ascii=False).split("\n")
    settings = "\n".join(html_text(line, LONGEST_MESSAGE) for line in lines)
    return (
        f"<h2>Settings and versions</h2><p>{result.epsilon_text()}</p><pre>{settings}</pre>"
        f"<p>{result.done} of {result.total} units; {result.seconds:.1f} s in the last run.</p>"
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th data-sorts="">{html_text(one)}</th>' for one in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f"<h2>{html_text(title)}</h2><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _cell(value: object, late: str = "") -> str:
    if isinstance(value, float):
        return f'<td data-key="{value!r}"{late}>{value:.4g}</td>'
    text = "" if value is None else html_text(value)
    return f'<td{late} data-key="{text}">{text}</td>'


def _name(text: str, limit: int = LONGEST_NAME) -> str:
    return f'<td class="name">{html_text(text, limit)}</td>'
