"""Which dataset to train on first: twelve tasks from four datasets of images.

    python -m experiments.transfer_study --data-root DIR [--run DIR] [--minutes 10]
        [--samples 2000] [--features] [--output DIR]

MNIST, Fashion-MNIST, USPS and the bundled digits at 28 x 28, each whole and as two halves of its
classes: 12 tasks, 116 ordered pairs without rows in common, five seeds, 100 rows of each target.
The protocol was fixed before any result was seen: the defaults of `python -m otdd_flash.study` but
for these numbers and `epsilon_relative=0.01`.

The study stops after some minutes and goes on when it is called again; once it is complete the
table is written. For every measure it says rho, Spearman's correlation with the gain over ordered
pairs, positive where the measure predicts gain; its interval by the jackknife over the 12 tasks,
which is one for more halves of these four datasets and not for other datasets; rho over pairs
within families and between them; rho with each family left out in turn; and the regret, the points
of gain that choosing a source by the measure costs against the best of all seeds. A measure that is
the same for all sources has no rho. Four families are too few for an interval over families.

With `--features` the same on features of EfficientNet-Lite0 (the extra `vision`): no images any
more, and so networks with one hidden layer. Of these the table and the numbers are written, and no
picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module

from experiments.environment import RESULTS, environment, write_result
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.settings import parse
from otdd_flash.commands.study import StudySettings, load_tasks, study_of
from otdd_flash.files.atomic import write_json
from otdd_flash.report.page import INK, SOURCE_COLOR, new_figure, save_picture
from otdd_flash.report.study.writing import write_study_report
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.result import StudyResult
from otdd_flash.study.statistics import (
    Mask,
    PairTable,
    correlation_interval,
    regret,
    replicates,
    spearman,
)
from otdd_flash.study.study import Study

TARGET_SAMPLES, EPSILON_RELATIVE = 100, 0.01
AIM = 0.40
NAME = "transfer_study"


def study(data_root: str, samples: int, *, features: bool) -> Study:
    """The study, its tasks loaded."""
    overrides = [
        "tasks=images",
        f"data_root={data_root}",
        f"max_samples={samples}",
        f"transfer.target_samples={TARGET_SAMPLES}",
        f"epsilon_relative={EPSILON_RELATIVE}",
        "device=cpu",
    ]
    if features:
        overrides += [
            "extractor=efficientnet_lite0",
            # Small batches stay in a processor's caches: three times as fast as 256.
            "extractor.batch_size=4",
        ]
    with initialize_config_module("otdd_flash.conf", version_base="1.3"):
        settings = parse(compose("study", overrides=overrides), StudySettings)
    with Phases() as phases:
        tasks = load_tasks(settings, phases)
    return study_of(settings, tasks)


def run(
    whole: Study, folder: Path, minutes: float, workers: int
) -> tuple[StudyResult, dict[str, Any]]:
    """The study, as far as it comes within some minutes, and how long all parts took."""
    started = time.monotonic()
    with Phases() as phases, phases.phase("study", "computing") as progress:
        result = whole.run(
            folder,
            resume=True,
            workers=workers,
            threads=1,
            progress=progress,
            stop=lambda: time.monotonic() - started > 60 * minutes,
        )
    times = folder / "units" / "times.json"
    known = json.loads(times.read_text("utf-8"))["seconds"] if times.exists() else []
    spent = {"workers": workers, "seconds": [*known, round(result.seconds, 1)]}
    write_json(times, spent)
    return result, spent


def rows_of(result: StudyResult) -> list[dict[str, Any]]:
    """What is said of every measure."""
    by_task = list(result.names)
    # As it was fixed before looking: the best source is that of all seeds.
    lost = regret(result.gains[None], result.gains[None])
    rows = []
    for name in result.readings:
        # The interval over tasks: every task is a unit of its own.
        table = replace(result.table(name), families=by_task)
        found = correlation_interval(replicates(table, spearman))
        families = np.array([task.family for task in result.setup.tasks])
        same = families[:, None] == families[None, :]
        without = {
            str(family): _rho(
                table, table.present & (families != family)[:, None] & (families != family)
            )
            for family in dict.fromkeys(families)
        }
        rho = _rho(table, table.present)
        rhos = (rho, *without.values())
        rows.append(
            {
                "measure": name,
                "sign": MEASURES[name].nearer,
                "pairs": table.count,
                "rho": rho,
                "lower": None if rho is None else found.lower,
                "upper": None if rho is None else found.upper,
                "within_families": _rho(table, table.present & same),
                "between_families": _rho(table, table.present & ~same),
                "without": without,
                "regret": float(lost(table.measure[None], table.gains, table.present[None])[0]),
                "aim_reached": all(rho is not None and rho > AIM for rho in rhos),
            }
        )
    return rows


def _rho(table: PairTable, mask: Mask) -> float | None:
    """Spearman's correlation of some pairs; None of a measure that chooses no source."""
    rho = float(spearman(table.measure[None], table.gains, mask[None])[0])
    return None if table.saturated or np.isnan(rho) else rho


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for the README."""
    families = list(rows[0]["without"])
    heads = ["measure", "rho", "over the 12 tasks", "within", "between"]
    heads += [*(f"without {family}" for family in families), "regret"]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for row in rows:
        interval = "none" if row["lower"] is None else f"{row['lower']:.2f} to {row['upper']:.2f}"
        cells = [row["measure"], _two_digits(row["rho"]), interval]
        cells += [_two_digits(row[key]) for key in ("within_families", "between_families")]
        cells += [_two_digits(row["without"][family]) for family in families]
        cells.append(f"{row['regret']:.1f}")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw rho of every measure with its interval; what is saturated is left out and named."""
    known = [row for row in rows if row["rho"] is not None]
    flat = [MEASURES[row["measure"]].title for row in rows if row["rho"] is None]
    figure = new_figure(8.0, 0.9 + 0.34 * len(known))
    axes = figure.subplots()
    places = np.arange(len(known))[::-1]
    rho, lower, upper = (np.array([row[key] for row in known]) for key in ("rho", "lower", "upper"))
    axes.errorbar(
        rho, places, xerr=(rho - lower, upper - rho), fmt="o", color=SOURCE_COLOR, ecolor="0.6"
    )
    axes.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.axvline(AIM, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(places, [MEASURES[row["measure"]].title for row in known], color=INK)
    note = f"\nleft out, the same for all sources: {', '.join(flat)}" if flat else ""
    label = f"rank correlation with the gain over ordered pairs (dotted: the aim){note}"
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.set_ylim(-0.6, len(known) - 0.4)
    axes.spines[:].set_color("0.8")
    figure.tight_layout()
    save_picture(figure, path)


def _two_digits(rho: float | None) -> str:
    return "none" if rho is None else f"{rho:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a transfer study of twelve tasks")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--run", type=Path, default=Path("outputs") / NAME)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.features:
        given.run = given.run.with_name(f"{given.run.name}_features")
    name = f"{NAME}_features" if given.features else NAME
    whole = study(given.data_root, given.samples, features=given.features)
    result, spent = run(whole, given.run, given.minutes, given.workers)
    print(f"{result.done} of {result.total} pieces of work are done")
    if not result.complete:
        print("call it again to go on")
        return
    write_study_report(result, given.run)
    rows = rows_of(result)
    table = markdown(rows)
    print(table)
    content = {
        "settings": result.setup.to_dict(),
        "measures": rows,
        "correlations": [
            row._asdict() for row in result.correlations() if " - " not in row.measure
        ],
        "notes": list(result.notes()),
        "parts": spent,
        **environment(result.setup.settings.compute.device),
    }
    write_result(name, content, given.output)
    (given.output / f"{name}.md").write_text(table, encoding="utf-8")
    if not given.features:
        draw(rows, given.output / f"{name}.png")


if __name__ == "__main__":
    main()
