"""`python -m otdd_flash.study` and the console command `otdd-study`: a study from the command line.

pyproject.toml names `script` as the console command; the work of a study is in `commands.study`.
Imports at the top must stay light, so that help is shown without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otdd_flash.commands.start import run_command, run_hydra, run_script, run_work

if TYPE_CHECKING:
    from omegaconf import DictConfig


def job(config: DictConfig) -> int:
    """Run one job (a multirun has several) and return its exit code (`commands.start`)."""
    return run_work("study", config)


def main() -> None:
    """Run the command through Hydra, with the configuration conf/study.yaml."""
    run_hydra(job, "study")


def script() -> None:
    """Run the console command `otdd-study`.

    As with `python -m`, functions that the user names are also looked for in the working directory.
    """
    run_script(main)


if __name__ == "__main__":
    run_command(main)
