"""`python -m otdd_flash.shift` and the console command `otdd-shift`: whether data have shifted.

pyproject.toml names `script` as the console command `otdd-shift`. `run_hydra` reads
conf/shift.yaml and the arguments and calls `job`; `run_work` then imports `commands.shift`, which
does the work. Imports at the top must stay light, so that help is shown without importing torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from otdd_flash.commands.start import run_command, run_hydra, run_script, run_work

if TYPE_CHECKING:
    from omegaconf import DictConfig


def job(config: DictConfig) -> int:
    """Run one job (a multirun has several) and return its exit code."""
    return run_work("shift", config)


main = partial(run_hydra, job, "shift")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
