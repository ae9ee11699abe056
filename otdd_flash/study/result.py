"""The result of a study: readings of measures, transfer runs and statistics of the units done.

`gather` reads the units of a folder into a `StudyResult`; `study.study` calls it when a run ends.
`commands.study`, `commands.results` and the modules of `report.study` read it. Rows must stay
ordered by measure, source and target, so that the csv files of a study that is run again are equal.
The fields of `MeasuredPair` and `TransferredPair` are the columns of pairs.csv and transfer.csv, so
their names and order must stay. An unfinished study must have a valid result, because runs are
stopped and resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otdd_flash.errors import NotConvergedWarning, choose, warn
from otdd_flash.files.atomic import json_content
from otdd_flash.plugins import blamed_on
from otdd_flash.raw_labels import frame_of
from otdd_flash.shown import display, epsilon_shown, sentence
from otdd_flash.solver.schedules import Schedule
from otdd_flash.study.findings import Choice, Finding, choices, findings
from otdd_flash.study.measures import MEASURES, Reading, measures_named
from otdd_flash.study.measures.base import Pair
from otdd_flash.study.measures.distances import epsilon_unit
from otdd_flash.study.setup import Setup
from otdd_flash.study.statistics import Numbers, PairTable, levelled
from otdd_flash.study.training import (
    FEWEST_ERRORS,
    gain_errors,
    gains,
    halved_gains,
    run_unit,
)
from otdd_flash.study.units import Store, Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# The fewest tasks for correlations.
FEWEST_TASKS = 4


class MeasuredPair(NamedTuple):
    """The reading of one measure for one ordered pair of tasks, with the fields of `Reading`.

    A value that is not finite is None.
    """

    measure: str
    source: str
    target: str
    value: float | None
    lower: float | None
    upper: float | None
    sample_lower: float | None
    sample_upper: float | None
    deviation: float | None
    root: float | None
    root_lower: float | None
    root_upper: float | None
    floor_source: float | None
    floor_target: float | None
    converged: bool


class TransferredPair(NamedTuple):
    """The transfer from one task to another.

    Attributes:
        source: the task on which the network was trained first.
        target: the task on which its training continues.
        gain: 100 (e0 - e1) / e0 in percent; None if e0 is below 5 errors.
        gain_error: its standard error over seeds; None for one seed.
        alone: e0, the mean error in percent of training on the target alone.
        transferred: e1, the mean error in percent after transfer.
        errors: the number of test errors of each seed's run.
        test_rows: the target's number of test rows.
    """

    source: str
    target: str
    gain: float | None
    gain_error: float | None
    alone: float
    transferred: float
    errors: tuple[int, ...]
    test_rows: int


@dataclass(frozen=True, eq=False)
class StudyResult:
    """The results of a study, as far as its units are done.

    Attributes:
        setup: tasks and settings.
        readings: by measure and ordered pair (i, j).
        errors: (K, K, S) test errors of transfer runs; NaN for missing runs.
        alone: (K, S) test errors of runs on the targets alone.
        done: the number of units done.
        total: the number of units.
        failures: the records of units that failed, as their error.json files hold them.
        seconds: wall time of this run.
        epsilon: of all transport, in units of the cost; None if it is not computed yet.
        mean_cost: the mean cost over all pairs; None if it is not computed yet.
    """

    setup: Setup
    readings: Mapping[str, Mapping[Pair, Reading]]
    errors: Numbers
    alone: Numbers
    done: int
    total: int
    failures: tuple[Mapping[str, Any], ...]
    seconds: float
    epsilon: float | None = None
    mean_cost: float | None = None

    def __repr__(self) -> str:
        """Return one line with the tasks, the measures and the number of units done."""
        tasks = ", ".join(display(name) for name in self.names)
        return (
            f"StudyResult({len(self.names)} tasks: {tasks}; {', '.join(self.readings)}; "
            f"{self.done} of {self.total} pieces of work done)"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return self.setup.names

    @property
    def complete(self) -> bool:
        """Whether all units are done."""
        return self.done == self.total

    @property
    def converged(self) -> bool:
        """Whether every solve reached its tolerance."""
        return all(one.converged for found in self.readings.values() for one in found.values())

    @cached_property
    def gains(self) -> Numbers:
        """Gains (K, K) in percent; NaN for missing ones."""
        return gains(self.errors, self.alone)

    @cached_property
    def gain_errors(self) -> Numbers:
        """Standard errors (K, K) of the gains over seeds."""
        return gain_errors(self.errors, self.alone)

    def pairs(self) -> tuple[MeasuredPair, ...]:
        """Return one row per measure and ordered pair, in the order of measures and tasks."""
        return tuple(
            MeasuredPair(
                name,
                self.names[i],
                self.names[j],
                _known(reading.value),
                *(getattr(reading, field.name) for field in fields(Reading)[1:]),
            )
            for name, found in self.readings.items()
            for (i, j), reading in sorted(found.items())
        )

    def transfers(self) -> tuple[TransferredPair, ...]:
        """Return one row per ordered pair whose runs are all done, in the order of tasks."""
        rows = []
        for i, j in self.setup.ordered_pairs():
            runs, alone, test = self.errors[i, j], self.alone[j], self.setup.tasks[j].test
            if test is None or not len(runs) or np.isnan([runs, alone]).any():
                continue
            rate = 100 / len(test)
            rows.append(
                TransferredPair(
                    self.names[i],
                    self.names[j],
                    _known(self.gains[i, j]),
                    _known(self.gain_errors[i, j]),
                    rate * float(alone.mean()),
                    rate * float(runs.mean()),
                    tuple(int(count) for count in runs),
                    len(test),
                )
            )
        return tuple(rows)

    def choices(self, measure: str | None = None, *, own_family: bool = True) -> tuple[Choice, ...]:
        """Return which source a measure chooses for each target, and the regret of the choice.

        Args:
            measure: its name; None is the measure that was fixed when the study began.
            own_family: whether sources of a target's own family are included.

        Returns:
            One row for each target with two sources or more, in the order of tasks.

        Raises:
            InputError: the study has no such measure.
        """
        name = self.setup.settings.measure if measure is None else measure
        choose("measure", name, tuple(self.readings))
        return choices(
            name,
            self.table(name),
            self._halves,
            self.gain_errors,
            names=self.names,
            sizes=[len(task.train) for task in self.setup.tasks],
            own_family=own_family,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return settings, rows and statistics as JSON types; None for numbers that are not finite.

        Keys: `settings`, the content of study.json; `pairs`, `transfers`, `choices` and
        `correlations`, each a list of rows with the fields of the methods of these names; `notes`;
        `failures`; `done` and `total`, numbers of units; `converged`; `seconds` of this run.
        """
        return json_content(
            {
                "settings": self.setup.to_dict(),
                "pairs": [row._asdict() for row in self.pairs()],
                "transfers": [row._asdict() for row in self.transfers()],
                "choices": [row._asdict() for row in self.choices()] if self.readings else [],
                "correlations": [row._asdict() for row in self.correlations()],
                "notes": self.notes(),
                "failures": self.failures,
                "done": self.done,
                "total": self.total,
                "converged": self.converged,
                "seconds": self.seconds,
            }
        )

    def to_frame(self) -> DataFrame:
        """Return a pandas table with one row per ordered pair of tasks, in the order of tasks.

        Columns: `source` and `target`; in a study with transfer `gain`, the share of the target's
        errors that transfer avoids, its standard error `gain_error`, and the mean errors `alone`
        and `transferred` on the test rows, all in percent; then for each measure its value `NAME`,
        other numbers that any pair has, such as `NAME.lower`, `NAME.sample_upper` or
        `NAME.root`, in the unit of the measure (`otdd`: units of the cost), and `NAME.converged`.
        Numbers that a pair does not have are missing.
        """
        kinds: dict[str, Any] = {"source": str, "target": str}
        if self.setup.settings.transfer is not None:
            kinds |= dict.fromkeys(("gain", "gain_error", "alone", "transferred"), float)
        for name, found in self.readings.items():
            kinds[name] = float
            for part in MeasuredPair._fields[4:-1]:
                if any(getattr(reading, part) is not None for reading in found.values()):
                    kinds[f"{name}.{part}"] = float
            kinds[f"{name}.converged"] = bool | None
        pairs = ((self.names[i], self.names[j]) for i, j in self.setup.ordered_pairs())
        rows: dict[tuple[str, str], dict[str, Any]] = {
            pair: {"source": pair[0], "target": pair[1]} for pair in pairs
        }
        for run in self.transfers():
            rows[run.source, run.target] |= run._asdict()
        for measure, source, target, value, *numbers in self.pairs():
            parts = zip(MeasuredPair._fields[4:], numbers, strict=True)
            known = {f"{measure}.{part}": number for part, number in parts}
            rows[source, target] |= {measure: value, **known}
        return frame_of(rows.values(), kinds)

    def plot(self) -> Figure:
        """Draw gains against the measure that chooses; without transfer, a distance.

        These are the report's gains_against_MEASURE.png and distances.png.

        Returns:
            A matplotlib figure that pyplot does not register. Notebooks display it, and `savefig`
            writes it to a file.

        Raises:
            InputError: no unit is done that could be drawn.
        """
        from otdd_flash.report.study.writing import plot_study

        return plot_study(self)

    def correlations(self) -> tuple[Finding, ...]:
        """Return the statistics of all measures; none without transfer or below 4 tasks."""
        return self._findings

    def table(self, measure: str) -> PairTable:
        """Return oriented measure and gains over the ordered pairs without shared rows."""
        allowed = np.zeros(self.gains.shape, dtype=bool)
        allowed[tuple(np.array(self.setup.transferred(), dtype=int).reshape(-1, 2).T)] = True
        values = np.where(allowed, self.oriented(measure), np.nan)
        families = [str(task.family) for task in self.setup.tasks]
        return PairTable(values, self.gains, families)

    def matrix(self, measure: str, part: str = "value") -> Numbers:
        """Return the (K, K) values of a measure over all ordered pairs; NaN for missing ones.

        Args:
            measure: its name.
            part: `value`, or another number of a reading such as `lower`.
        """
        values = np.full(self.gains.shape, np.nan)
        for pair, reading in self.readings[measure].items():
            number = getattr(reading, part)
            values[pair] = np.nan if number is None else number
        return values

    def oriented(self, measure: str) -> Numbers:
        """Return the (K, K) measure, signed so that larger values predict more gain.

        Tied values are made equal.

        Values are tied if they are equal up to rounding, or if their solver bounds overlap.
        """
        kind = MEASURES[measure]
        values, lower, upper = self.matrix(measure), None, None
        if kind.proven:
            lower, upper = self.matrix(measure, "lower"), self.matrix(measure, "upper")
        return kind.nearer * levelled(values, unit=kind.unit, lower=lower, upper=upper)

    def epsilon_text(self) -> str:
        """Return a phrase on epsilon, penalties and the epsilon of class distances, or ""."""
        if self.epsilon is None:
            return ""
        own = getattr(self.setup.settings.labels, "epsilon", None)
        classes = "" if own is None else f"; class distances by sinkhorn, epsilon {own:.6g}"
        penalties = "".join(
            f", {name}={value:g}" for name, value in self.setup.settings.penalties.items()
        )
        return f"epsilon {epsilon_shown(self.epsilon, self.mean_cost)}{penalties}{classes}"

    def notes(self) -> tuple[str, ...]:
        """Return sentences on what was left out, and why."""
        names, said = [display(name) for name in self.names], []
        for (i, j), count in self.setup.shared.items():
            said.append(
                f"{names[i]} and {names[j]} share {count} rows: nothing is transferred between them"
            )
        for name, found in self.readings.items():
            unknown = sum(not np.isfinite(one.value) for one in found.values())
            if unknown:
                said.append(f"{name} has no number for {unknown} of {len(found)} pairs")
        said += [
            f"{row.measure} has no correlation with the gain; {row.note}"
            for row in self.correlations()
            if row.statistic == "spearman" and row.value is None and " - " not in row.measure
        ]
        if self.setup.settings.transfer is not None:
            for j, runs in enumerate(self.alone):
                if np.isfinite(runs).all() and runs.mean() < FEWEST_ERRORS:
                    said.append(
                        f"{names[j]} alone is learnt with {runs.mean():g} errors, fewer than "
                        f"{FEWEST_ERRORS}: pairs with this target have no gain"
                    )
        said += [
            sentence(f"{failure['unit']} failed: {failure['error']}") for failure in self.failures
        ]
        if not self.complete:
            said.append(f"{self.done} of {self.total} pieces of work are done")
        return tuple(said)

    @cached_property
    def _halves(self) -> tuple[Numbers, Numbers]:
        return halved_gains(self.errors, self.alone)

    @cached_property
    def _findings(self) -> tuple[Finding, ...]:
        settings = self.setup.settings
        if settings.transfer is None or len(self.names) < FEWEST_TASKS:
            return ()
        tables = {name: self.table(name) for name, found in self.readings.items() if found}
        if not tables:
            return ()
        return findings(
            tables,
            sizes=[len(task.train) for task in self.setup.tasks],
            halves=self._halves,
            gains_of=lambda pair: gains(self.errors, self.alone, pair),
            seeds=settings.transfer.seeds,
            seed=settings.seed,
        )


def gather(setup: Setup, store: Store, units: Sequence[Unit], *, seconds: float) -> StudyResult:
    """Read the units that are done into a result.

    Warns:
        NotConvergedWarning: a term stopped before its tolerance.
    """
    settings, readings = setup.settings, {}
    for measure in measures_named(settings.measures, transfer=settings.transfer is not None):
        with blamed_on(measure, f"measure {measure.name}"):
            readings[measure.name] = dict(measure.read(setup, store))
    count = len(setup.tasks)
    seeds = 0 if settings.transfer is None else settings.transfer.seeds
    errors, alone = np.full((count, count, seeds), np.nan), np.full((count, seeds), np.nan)
    for seed in range(seeds):
        for j in range(count):
            alone[j, seed] = _errors(store, run_unit(setup, None, j, seed))
        for i, j in setup.transferred():
            errors[i, j, seed] = _errors(store, run_unit(setup, i, j, seed))
    # Counted last, because reading may recompute damaged units.
    failures = [failure for unit in units if (failure := store.failure(unit)) is not None]
    done = sum(store.done(unit) for unit in units)
    # Its facts are `epsilon` and `mean_cost`.
    epsilon = store.known(epsilon_unit(setup))
    result = StudyResult(
        setup,
        readings,
        errors,
        alone,
        done,
        len(units),
        tuple(failures),
        seconds,
        **({} if epsilon is None else epsilon.facts),
    )
    _warn_unconverged(result, settings.solver)
    return result


def _errors(store: Store, unit: Unit) -> float:
    content = store.known(unit)
    return np.nan if content is None else float(content.facts["errors"])


def _warn_unconverged(result: StudyResult, solver: Schedule) -> None:
    late = [row for row in result.pairs() if not row.converged]
    if late:
        first = late[0]
        warn(
            f"{len(late)} of {len(result.pairs())} numbers rest on transport that stopped "
            f"early, the first {first.measure} of {first.source} and {first.target}; raise "
            f"{solver.limits}",
            NotConvergedWarning,
        )


def _known(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
