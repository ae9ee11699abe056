"""All files of a study beside its units: csv files, pictures and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.arguments.values import FOLDER
from otdd_flash.checks import takes
from otdd_flash.errors import InputError, choose
from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.report.figures.drawing import CONTENTS, Report, Writers, wanted, write_each
from otdd_flash.report.figures.fonts import notice_missing_glyphs
from otdd_flash.report.figures.page import figure_of
from otdd_flash.report.study.page import write_page
from otdd_flash.report.study.pictures import draw_gains, draw_gains_against, draw_measure
from otdd_flash.report.study.sentences import saturated_measures
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.result import MeasuredPair, StudyResult, TransferredPair
from otdd_flash.study.statistics.choices import Choice
from otdd_flash.study.statistics.findings import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Writer = Callable[[Path], object]

PAGE = "report.html"
TABLES = ("choices.csv", "pairs.csv", "transfer.csv", "correlations.csv")
PICTURES = ("distances.png", "gains.png", "gains_against_*.png")
# Patterns of all that is written beside study.json and units: measures may be of other packages.
FILES = (*TABLES, *PICTURES, PAGE)


@takes(FOLDER)
def write_study_report(
    result: StudyResult, directory: str | Path, *, content: str = "full"
) -> Report:
    """Write choices.csv, pairs.csv, transfer.csv, correlations.csv, pictures and report.html.

    The csv files hold no times: of one study they are always the same.

    Args:
        result: of `Study.run`; what is not done is left out.
        directory: made if it does not exist.
        content: `full`, `table` for no pictures or `none` for csv files alone.

    Returns:
        The files written, and those that could not be.

    Raises:
        InputError: no such content.

    Warns:
        MissingFileNotice: a file could not be written; the others are.
    """
    choose("report", content, CONTENTS)
    directory = Path(directory)
    contents: tuple[tuple[Sequence[str], Callable[[], Sequence[Sequence[object]]]], ...] = (
        (Choice._fields, partial(_choices, result)),
        (MeasuredPair._fields, result.pairs),
        (TransferredPair._fields, result.transfers),
        (Finding._fields, result.correlations),
    )
    writers: Writers = {
        directory / name: partial(_write_table, columns, rows)
        for name, (columns, rows) in zip(TABLES, contents, strict=True)
    }
    report = write_each(writers)
    if content == "full":
        notice_missing_glyphs(result.names)
    pictures = _pictures(result, directory)
    drawn = {path: writer for path, (_, writer) in pictures.items()}
    report += write_each(wanted(drawn, content))
    if content != "none":
        first = f"gains_against_{result.setup.settings.measure}.png"
        shown: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
        for path, (caption, _) in pictures.items():
            shown[path.name.startswith("gains_against_") and path.name != first][caption] = path
        report += write_each({directory / PAGE: partial(write_page, result, *shown)})
    return report


def plot_study(result: StudyResult) -> Figure:
    """Draw gains against the measure that chooses; without gains the first distance or measure.

    Raises:
        InputError: nothing that one could draw is done.
    """
    known = _drawn_measures(result)
    if not known:
        raise InputError(
            f"nothing of this study can be drawn yet, {result.done} of {result.total} pieces of "
            "work are done; run it again with resume=True to go on"
        )
    gained = [name for name in known if result.transfers() and result.table(name).count]

    def draw() -> Figure:
        if gained:
            return draw_gains_against(result, gained[0], None)
        return draw_measure(result, _distance(known) or known[0], None)

    return figure_of(draw, result.names)


def _drawn_measures(result: StudyResult) -> list[str]:
    """Return the measures that differ between sources, the one that chooses first."""
    flat = saturated_measures(result)
    known = [name for name, found in result.readings.items() if found and name not in flat]
    return sorted(known, key=lambda name: name != result.setup.settings.measure)


def _distance(known: Sequence[str]) -> str | None:
    """The first of some measures that is a distance."""
    return next((name for name in known if MEASURES[name].nearer < 0), None)


def _choices(result: StudyResult) -> list[tuple[object, ...]]:
    """The choices of all measures, with and without sources of the target's own family."""
    return [
        tuple("; ".join(part) if isinstance(part, tuple) else part for part in row)
        for measure, found in result.readings.items()
        if found
        for own_family in (True, False)
        for row in result.choices(measure, own_family=own_family)
    ]


def _write_table(
    columns: Sequence[str], rows: Callable[[], Sequence[Sequence[object]]], path: Path
) -> None:
    write_table_csv(path, columns, rows())


def _pictures(result: StudyResult, directory: Path) -> dict[Path, tuple[str, Writer]]:
    """Captions and writers, by their files; saturated measures have none."""
    known = _drawn_measures(result)
    found: dict[Path, tuple[str, Writer]] = {}
    if result.transfers():
        found[directory / "gains.png"] = "Gains by transfer", partial(draw_gains, result)
        for name in known:
            if result.table(name).count:
                caption = f"Gains against {MEASURES[name].title}, target by target"
                writer = partial(draw_gains_against, result, name)
                found[directory / f"gains_against_{name}.png"] = caption, writer
    near = _distance(known)
    if near is not None:
        caption = f"{MEASURES[near].title} between all tasks"
        found[directory / "distances.png"] = caption, partial(draw_measure, result, near)
    return found
