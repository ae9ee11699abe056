"""`python -m otdd_flash.study`: a dataset-transfer study from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otdd_flash.commands.start import run_command, run_hydra, run_script

if TYPE_CHECKING:
    from omegaconf import DictConfig


def job(config: DictConfig) -> int:
    """Carry out one job and return its exit code."""
    # Imported here: help is shown without what computes.
    from otdd_flash.commands.progress import importing

    with importing():
        from otdd_flash.commands.outcome import run_job
        from otdd_flash.commands.study import study

    return run_job(study, config)


def main() -> None:
    """Hydra's entry point."""
    run_hydra(job, "study")


def script() -> None:
    """The console command `otdd-study`."""
    run_script(main)


if __name__ == "__main__":
    run_command(main)
