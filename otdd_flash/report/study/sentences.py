"""What a study comes to, in sentences that stand on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from otdd_flash.shown import display, interval
from otdd_flash.study.measures import MEASURES, Reading
from otdd_flash.study.result import FEWEST_TASKS, MeasuredPair, StudyResult
from otdd_flash.study.statistics.findings import Finding
from otdd_flash.study.statistics.jackknife import FEWEST_UNITS


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


def choice_sentences(result: StudyResult) -> list[str]:
    """How to read the table of choices, and what its one correlation is.

    Without a choice, why there is none, and which tasks are nearest.
    """
    if not result.choices():
        return [_why_none(result), *_nearest(result), *not_sampled(result)]
    measure = result.setup.settings.measure
    (row,) = (
        row
        for row in result.correlations()
        if (row.measure, row.statistic) == (measure, "spearman_over_sources")
    )
    return [
        f"{MEASURES[measure].title} was fixed as the measure that chooses before any gain was "
        "known. A gain is by how many percent fewer errors the target's test rows have than "
        "without a source, a regret how many points of it a choice gives away to the best source.",
        _picking(result),
        _correlation(row),
        *_about_families(result),
        *not_sampled(result),
    ]


def difference_sentences(result: StudyResult) -> Iterable[str]:
    """Which measures follow the gain more closely than others over the sources of a target."""
    known = [
        row
        for row in result.correlations()
        if " - " in row.measure
        and row.statistic == "spearman_over_sources"
        and row.lower is not None
    ]
    clear = 0
    for row in known:
        assert row.value is not None
        assert row.lower is not None
        assert row.upper is not None
        if row.lower <= 0 <= row.upper:
            continue
        clear += 1
        names, ends = row.measure.split(" - "), (row.value, row.lower, row.upper)
        if row.value < 0:
            names, ends = names[::-1], (-row.value, -row.upper, -row.lower)
        better, worse = (MEASURES[name].title for name in names)
        difference, lower, upper = ends
        yield (
            f"{better} follows the gain over sources more closely than {worse}: Fisher's z of its "
            f"rank correlation is larger by {difference:.2f} [{lower:.2f}, {upper:.2f}]."
        )
    if known and not clear:
        yield (
            "No two measures differ in their rank correlation over sources by more than the "
            "intervals of these differences."
        )


def correlation_text(row: Finding) -> str:
    """A correlation with its interval, or that there are too few datasets to tell."""
    if row.value is None:
        return row.note
    if row.lower is None or row.upper is None:
        return "too few to tell"
    return f"{row.value:+.2f} [{row.lower:+.2f}, {row.upper:+.2f}]"


def one_decimal(points: float) -> str:
    """Points of gain; what rounds to nothing has no sign."""
    return f"{round(points, 1) + 0.0:.1f}"


def saturated_measures(result: StudyResult) -> list[str]:
    """The measures that are the same for all sources of every target, and so show nothing."""
    return [name for name, found in result.readings.items() if found and _flat(result, name)]


def _flat(result: StudyResult, measure: str) -> bool:
    return result.table(measure).saturated


def _picking(result: StudyResult) -> str:
    if result.alone.shape[-1] < 2:
        return (
            "There is one seed, so that the best source is picked and scored on the same runs: its "
            "gain and all regrets are too large on average, by an amount that is not known, and "
            "there is no standard error; transfer.seeds=2 or more tells them apart."
        )
    return (
        "The best source is picked on half of the seeds and scored on the others, in both "
        "directions, and its gain is that score, so that none is best by luck; a regret below 0 "
        "says that a choice did better than the source picked so. Tied are sources within one "
        "standard error (±, over seeds) of the best; where a measure does not tell sources apart, "
        "their mean counts."
    )


def _correlation(row: Finding) -> str:
    title = MEASURES[row.measure].title
    found = correlation_text(row)
    about = f"Rank correlation of {title} with the gain over the sources of each target"
    if row.value is None:
        return f"{about}: none; {found}."
    if row.lower is None:
        few = f", and an interval needs {FEWEST_UNITS}" if row.datasets < FEWEST_UNITS else ""
        return f"{about}: {found}, from {row.datasets} independent datasets{few}."
    return (
        f"{about}: {found}, the mean over targets, from {row.datasets} independent datasets; it is "
        "positive where the measure predicts gain."
    )


def _about_families(result: StudyResult) -> Iterable[str]:
    families = {task.family for task in result.setup.tasks}
    if len(families) < len(result.names):
        yield (
            f"The {len(result.names)} tasks come from {len(families)} families, which count as one "
            "dataset each: nothing here is known of other datasets than these."
        )


def _why_none(result: StudyResult) -> str:
    if result.setup.settings.transfer is None:
        return "Nothing was transferred, so that there are distances alone."
    if len(result.names) < FEWEST_TASKS:
        return f"A choice of sources asks for {FEWEST_TASKS} tasks."
    return "No target has two sources with a gain yet."


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
