"""The command `python -m otdd_flash.flow`: move a dataset towards another by a gradient flow.

`commands.start` runs it and `commands.adapt` does the work. `run_work` imports it, so that help is
shown without heavy modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otdd_flash.commands.start import run_command, run_hydra, run_script, run_work

if TYPE_CHECKING:
    from omegaconf import DictConfig


def job(config: DictConfig) -> int:
    """Run one job and return its exit code."""
    return run_work("adapt", config)


def main() -> None:
    """Start Hydra with the configuration of this command."""
    run_hydra(job, "flow")


def script() -> None:
    """Run the console command `otdd-flow`."""
    run_script(main)


if __name__ == "__main__":
    run_command(main)
