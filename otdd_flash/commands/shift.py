"""The work of `python -m otdd_flash.shift`: one shift test, or one a window, and its files.

For the entry point `otdd_flash.shift.__main__`, `commands.start.run_work` imports this module by
name and `commands.outcome.run_job` calls `shift`. result.json must be written and tables printed
before anything is drawn, so that an error in drawing loses no result. A shift that is found is no
failure: only if `fail_on_shift` is set, the command ends with exit code 5 (`ShiftFound`).

A key of conf/shift.yaml needs a field of the same name in `ShiftSettings`. The keys of result.json
must stay: `commands.outcome` reads `source`, `target`, `value`, `bounds`, `epsilon`, `converged`,
`p_value`, `effect` and others for the summary of a multirun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import RenderableType

from otdd_flash import checks
from otdd_flash.arguments import Count, Positive, Share, check_fields
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.results import track_shift, write_run
from otdd_flash.commands.settings import (
    EmbeddingSettings,
    ReportSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import prepare_sides
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError, ShiftFound
from otdd_flash.files.tensor_file import SUMMARY_FILE
from otdd_flash.report.shift import shift_table, write_shift_report
from otdd_flash.shift.joint import check_permutations, shift_test, shift_windows
from otdd_flash.shift.result import ShiftReport
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.term import refuse_both

# Settings that `shift_test` takes as they are.
PASSED_ON = (
    *("permutations", "stop_after", "parts", "min_effect", "epsilon", "epsilon_relative"),
    *("lambda_x", "lambda_y", "ground", "cache_dir", "seed"),
)


@dataclass
class ShiftSettings(EmbeddingSettings):
    """The settings of conf/shift.yaml."""

    reference: dict[str, Any]
    sample: dict[str, Any]
    ground: str
    lambda_x: float
    lambda_y: float
    epsilon: Positive | None
    epsilon_relative: Positive | None
    permutations: Count
    stop_after: Count | None
    alpha: Share
    groups: list[str] | None
    parts: bool
    min_effect: Positive | None
    window: Count | None
    fail_on_shift: Share | None
    report: ReportSettings

    def arguments(self) -> dict[str, Any]:
        """Return the keywords of `shift_test` and `shift_windows`.

        Settings that need no data are checked first, and the files of `groups` are read.
        """
        check_fields(self)
        check_permutations(self.permutations, None if self.window else self.level)
        refuse_both(self.epsilon, self.epsilon_relative)
        GroundCost(self.lambda_x, self.lambda_y, self.ground)
        self.log.check()
        if self.window is not None and self.sample.get("max_samples", self.max_samples) is not None:
            raise InputError(
                "window= takes the rows of sample in their order, and max_samples draws some of "
                "them; leave sample.max_samples out"
            )
        if self.groups is not None and len(self.groups) != 2:
            raise InputError("groups must be two files, [REFERENCE.npy,SAMPLE.npy], one id a row")
        for side in (self.reference, self.sample):
            if side.get("pseudo_labels") is not None:
                raise InputError(
                    "pseudo_labels cluster each side by itself, so that clusters differ without a "
                    "shift; leave them out, and set labels=none if there are no labels"
                )
        if self.labels.full:
            raise InputError("labels.full=true has no meaning here; leave it out")
        found = {key: getattr(self, key) for key in PASSED_ON}
        return found | {
            "groups": None if self.groups is None else list(map(_ids, self.groups)),
            "labels": self.labels.metric(Converged().asked_tolerance, self.epsilon),
            "compute": self.compute_options(),
        }

    @property
    def level(self) -> float:
        """The least level, that of all windows: `alpha`, or `fail_on_shift` if that is smaller."""
        return min(self.alpha, self.fail_on_shift or self.alpha)


def shift(config: DictConfig, directory: Path) -> None:
    """Test for a shift and write the files into `directory`.

    Raises:
        ShiftFound: `fail_on_shift` is given, and the p-value is not above it or a window has
            shifted at its share of `level`; all files are written.
    """
    settings = parse(config, ShiftSettings)
    kept = recorded(settings, config)
    arguments = settings.arguments()
    with Phases() as phases:
        sides = prepare_sides(settings, phases, whole=False, roles=("reference", "sample"))
        window, pair = settings.window, (sides.source, sides.target)
        with phases.phase("test", "permutations" if window is None else "windows") as progress:
            arguments["progress"] = progress
            if window is None:
                reports = [shift_test(*pair, alpha=settings.alpha, **arguments)]
            else:
                reports = shift_windows(*pair, window=window, alpha=settings.level, **arguments)
    summary = _summary(reports, window) | {
        "seconds": phases.all_seconds({}),
        "seed": settings.seed,
        "choices": sides.choices,
        "config": kept,
    }
    content = settings.report.content
    report = write_run(
        directory / SUMMARY_FILE,
        summary,
        content,
        [f"{each.p_value:.6g}" for each in reports],
        lambda: _tables(reports, window),
        lambda: write_shift_report(reports, directory, window=window, content=content),
    )
    report += track_shift(reports, settings.log, kept, directory)
    report.require_complete()
    _fail(reports, settings)


def _summary(reports: Sequence[ShiftReport], window: int | None) -> dict[str, Any]:
    """Return the content of result.json; of windows that with the least p-value over its level."""
    worst = min(reports, key=lambda each: each.p_value / each.alpha)
    source, target = worst.names
    # The entries of any result that summaries of a multirun read.
    common = {"source": source, "target": target, "value": worst.statistic, "converged": True}
    found = worst.to_dict() | common
    if window is not None:
        found |= {"window": window, "windows": [each.to_dict() for each in reports]}
    return found


def _tables(reports: Sequence[ShiftReport], window: int | None) -> list[RenderableType]:
    """Return the table and the sentences of a test, or one line a window."""
    if window is None:
        return [shift_table(reports[0]), *reports[0].sentences()]
    return [
        f"window {place}: p = {each.p_value:.3g}, {'shifted' if each.shifted else 'no shift found'}"
        for place, each in enumerate(reports, 1)
    ]


def _fail(reports: Sequence[ShiftReport], settings: ShiftSettings) -> None:
    if (limit := settings.fail_on_shift) is None:
        return
    alone = settings.window is None
    found = [r.p_value for r in reports if (r.p_value <= limit if alone else r.shifted)]
    if found:
        raise ShiftFound(
            f"the data have shifted: p = {min(found):.3g}, and fail_on_shift={limit:g} is set; the "
            "result is written"
        )


def _ids(path: str) -> list[str]:
    """Read one group a row from a .npy file."""
    path = checks.path("groups", path)
    try:
        return [str(each) for each in np.load(path, allow_pickle=False).reshape(-1)]
    except (OSError, ValueError) as error:
        raise InputError(f"groups: cannot read {path} as .npy ({error})") from error
