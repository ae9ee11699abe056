"""Hydra's callback that collects exit codes and ends a multirun with one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from otdd_flash.report.csv_tables import summary_csv

RESULT_FILE = "result.json"
ERROR_FILE = "error.json"


class Outcome(Callback):
    """Keeps the highest exit code of the process's jobs; writes summary.csv after a multirun.

    Both are read from the jobs' directories, so that a launcher may run the jobs anywhere.
    """

    exit_code: ClassVar[int] = 0

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Take the exit code of the single job."""
        job: JobReturn = kwargs["job_return"]
        if job.status == JobStatus.COMPLETED:
            Outcome.exit_code = int(job.return_value)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Gather all jobs into summary.csv and take the highest exit code."""
        sweep = Path(config.hydra.sweep.dir)
        rows = [_row(job, sweep) for job in _job_directories(sweep)]
        Outcome.exit_code = max((row.pop("exit_code") for row in rows), default=0)
        summary_csv(rows, sweep / "summary.csv")


def _job_directories(sweep: Path) -> list[Path]:
    jobs = [path.parent.parent for path in sweep.glob("*/.hydra/overrides.yaml")]
    return sorted(jobs, key=lambda path: (len(path.name), path.name))


def _row(job: Path, sweep: Path) -> dict[str, Any]:
    """One line of summary.csv, with the job's exit code beside it."""
    row: dict[str, Any] = {
        "job": job.name,
        "overrides": OmegaConf.to_container(OmegaConf.load(job / ".hydra" / "overrides.yaml")),
        "directory": str(job.relative_to(sweep)),
        "exit_code": 0,
    }
    result, error = _read(job / RESULT_FILE), _read(job / ERROR_FILE)
    if result:
        lower, upper = result["bounds"]
        row |= {key: result[key] for key in ("source", "target", "value", "epsilon", "converged")}
        row |= {"lower": lower, "upper": upper}
    if error:
        row |= {"error": error["error"], "exit_code": error["exit_code"]}
    return row


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
