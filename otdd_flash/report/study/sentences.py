"""What a study found: a sentence for every finding, with its interval."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from otdd_flash.shown import display, interval
from otdd_flash.study.measures import MEASURES, Reading
from otdd_flash.study.result import FEWEST_TASKS, MeasuredPair, StudyResult
from otdd_flash.study.statistics.findings import Finding

WHAT = {
    "spearman": "rank correlation with the gain over ordered pairs",
    "pearson": "linear correlation with the gain over ordered pairs",
    "spearman_over_sources": "mean over targets of the rank correlation over their sources",
    "partial_spearman": "rank correlation with the gain given the sizes of both datasets",
}


def findings_sentences(result: StudyResult) -> list[str]:
    """All sentences, measure by measure; without gains why, and which tasks are nearest."""
    rows = result.correlations()
    if not any(row.pairs for row in rows):
        return [_why_none(result), *_nearest(result), *not_sampled(result)]
    said = [sentence for row in rows if (sentence := _sentence(row, rows))]
    return [*said, *_differences(rows), *_about_units(result, rows), *not_sampled(result)]


def not_sampled(result: StudyResult) -> list[str]:
    """The sentence of a study without sampling intervals."""
    if result.setup.settings.subsample is not None or not any(result.readings.values()):
        return []
    return ["Sampling error was not measured: subsample=50 gives every distance an interval."]


def measured_text(measure: str, row: Reading | MeasuredPair) -> str:
    """A number of a pair with its interval, and what kind of interval that is."""
    kind = "solver bounds" if MEASURES[measure].proven else "interval over draws"
    if row.value is None:
        return "none"
    for lower, upper, name in (
        (row.sample_lower, row.sample_upper, "sampling interval"),
        (row.lower, row.upper, kind),
    ):
        if lower is not None and upper is not None:
            return f"{interval(row.value, lower, upper)} ({name})"
    return f"{row.value:.6g}"


def _sentence(row: Finding, rows: Iterable[Finding]) -> str:
    if row.statistic.startswith("ceiling"):
        return _ceiling(row)
    if " - " in row.measure or row.value is None:
        return ""
    title = MEASURES[row.measure].title
    if row.statistic == "regret":
        random = next(
            other
            for other in rows
            if other.measure == row.measure and other.statistic == "random_regret"
        )
        beside = "" if random.value is None else f"; at random it would be {random.value:.1f}"
        return (
            f"Choosing the source by {title} costs {row.value:.1f} points of gain{_range(row, 1)}"
            f"{beside}{_chance(row)}."
        )
    if row.statistic not in WHAT:
        return ""
    about = "" if row.lower is not None else f" ({row.note})" if row.note else ""
    return (
        f"{title}: {WHAT[row.statistic]} {row.value:+.2f}{_range(row, 2)}{about}{_chance(row)}, "
        f"{row.pairs} pairs of {row.units} units."
    )


def _ceiling(row: Finding) -> str:
    kind = "rank" if row.statistic.endswith("spearman") else "linear"
    if row.value is None:
        return (
            f"How much {kind} correlation the noise of the gains allows is not known: {row.note}."
        )
    return (
        f"By the noise of the gains over seeds, no measure can be expected to reach a {kind} "
        f"correlation above {row.value:.2f}."
    )


def _differences(rows: Iterable[Finding]) -> Iterable[str]:
    """Which measures follow the gain more closely than others; the others are in the table."""
    known = [
        row
        for row in rows
        if " - " in row.measure and row.statistic == "spearman" and row.lower is not None
    ]
    told = 0
    for row in known:
        assert row.value is not None
        assert row.lower is not None
        assert row.upper is not None
        if row.lower <= 0 <= row.upper:
            continue
        told += 1
        names, ends = row.measure.split(" - "), (row.value, row.lower, row.upper)
        if row.value < 0:
            names, ends = names[::-1], (-row.value, -row.upper, -row.lower)
        better, worse = (MEASURES[name].title for name in names)
        difference, lower, upper = ends
        yield (
            f"{better} follows the gain more closely than {worse}: Fisher's z of its rank "
            f"correlation is larger by {difference:.2f} [{lower:.2f}, {upper:.2f}]."
        )
    if known and not told:
        yield (
            "No two measures differ in their rank correlation with the gain by more than the "
            "intervals of these differences."
        )


def _about_units(result: StudyResult, rows: Iterable[Finding]) -> Iterable[str]:
    families = {task.family for task in result.setup.tasks}
    if len(families) < len(result.names):
        yield (
            f"The {len(result.names)} tasks come from {len(families)} families, which count as one "
            "dataset each: nothing here is known of other datasets than these."
        )
    yield "A positive correlation predicts gain, of distances as of scores."
    if any("no interval" in row.note for row in rows):
        yield "An interval needs five independent units, datasets or families."


def _why_none(result: StudyResult) -> str:
    if result.setup.settings.transfer is None:
        return "Nothing was transferred, so that there are distances alone."
    if len(result.names) < FEWEST_TASKS:
        return f"Correlations ask for {FEWEST_TASKS} tasks."
    return "No ordered pair has both a measure and a gain yet."


def _nearest(result: StudyResult) -> Iterable[str]:
    """The two nearest tasks by every distance, with its interval."""
    for name, found in result.readings.items():
        if MEASURES[name].nearer > 0 or not found:
            continue
        scores = result.oriented(name)
        best = [pair for pair in sorted(found) if scores[pair] == np.nanmax(scores)]
        if not best:
            continue
        (i, j), reading = best[0], found[best[0]]
        others = {tuple(sorted(pair)) for pair in best[1:]} - {tuple(sorted((i, j)))}
        tied = f", as near as {len(others)} other pairs" if others else ""
        yield (
            f"{MEASURES[name].title}: of all pairs {display(result.names[i])} and "
            f"{display(result.names[j])} are nearest, {measured_text(name, reading)}{tied}."
        )


def _range(row: Finding, digits: int) -> str:
    if row.lower is None or row.upper is None:
        return ""
    return f" [{row.lower:.{digits}f}, {row.upper:.{digits}f}]"


def _chance(row: Finding) -> str:
    return "" if row.p is None else f", p = {row.p:.2g} by permuting tasks"
