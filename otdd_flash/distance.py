"""The command `python -m otdd_flash.distance`: the dataset distance of a configuration.

pyproject.toml names `script` as the console command `otdd-distance`. `run_hydra` reads
conf/distance.yaml and the arguments and calls `job`; `run_work` then imports `commands.compare`,
which does the work. Imports at the top must stay light, so that help is shown without importing
torch.

`run_script` (console command) and `run_command` (`python -m`) call `main`, `main` calls
`run_hydra`, that calls `job`, and that `run_work`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from otdd_flash.commands.start import run_command, run_hydra, run_script, run_work

if TYPE_CHECKING:
    from omegaconf import DictConfig


def job(config: DictConfig) -> int:
    """Run one job (a multirun has several) and return its exit code.

    `run_job` has noted the code, too, and the process exits with the highest that was noted.
    """
    return run_work("compare", config)


main = partial(run_hydra, job, "distance")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
