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
from otdd_flash.report.study.pictures import draw_gains, draw_gains_against_measures, draw_measure
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.result import MeasuredPair, StudyResult, TransferredPair
from otdd_flash.study.statistics.findings import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Writer = Callable[[Path], object]

PAGE = "report.html"
TABLES = ("pairs.csv", "transfer.csv", "correlations.csv")
PICTURES = ("distances.png", "gains.png", "gains_against_measures.png")
# All that is written beside study.json and units.
FILES = (*TABLES, *PICTURES, PAGE)


@takes(FOLDER)
def write_study_report(
    result: StudyResult, directory: str | Path, *, content: str = "full"
) -> Report:
    """Write pairs.csv, transfer.csv, correlations.csv, pictures and report.html.

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
    contents = (
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
        captions = {caption: path for path, (caption, _) in pictures.items()}
        report += write_each({directory / PAGE: lambda path: write_page(result, captions, path)})
    return report


def plot_study(result: StudyResult) -> Figure:
    """Draw gains against measures; without gains the first distance, or else the first measure.

    Raises:
        InputError: nothing that one could draw is done.
    """
    measured = [name for name, known in result.readings.items() if known]
    if not measured:
        raise InputError(
            f"nothing of this study can be drawn yet, {result.done} of {result.total} units are "
            "done; run it again with resume=True to go on"
        )

    def draw() -> Figure:
        if result.transfers():
            return draw_gains_against_measures(result, None)
        return draw_measure(result, _distance(result) or measured[0], None)

    return figure_of(draw, result.names)


def _distance(result: StudyResult) -> str | None:
    """The first of the measured distances."""
    measured = (name for name, known in result.readings.items() if known)
    return next((name for name in measured if MEASURES[name].nearer < 0), None)


def _write_table(
    columns: Sequence[str], rows: Callable[[], Sequence[Sequence[object]]], path: Path
) -> None:
    write_table_csv(path, columns, rows())


def _pictures(result: StudyResult, directory: Path) -> dict[Path, tuple[str, Writer]]:
    """Captions and writers, by their files."""
    distances, gains, against = (directory / name for name in PICTURES)
    found: dict[Path, tuple[str, Writer]] = {}
    if (distance := _distance(result)) is not None:
        title = f"{MEASURES[distance].title} between all tasks"
        found[distances] = title, lambda path: draw_measure(result, distance, path)
    if result.transfers():
        found[gains] = "Gains by transfer", lambda path: draw_gains(result, path)
        found[against] = (
            "Gains against every measure",
            lambda path: draw_gains_against_measures(result, path),
        )
    return found
