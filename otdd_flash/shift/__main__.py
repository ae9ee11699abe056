"""`python -m otdd_flash.shift` and the console command `otdd-shift`: whether data have shifted.

pyproject.toml names `script` as the console command `otdd-shift`. `run_hydra` reads conf/shift.yaml
and the arguments; `run_work` then imports `commands.shift`, which does the work. Imports at the top
must stay light, so that help is shown without importing torch.
"""

from __future__ import annotations

from functools import partial

from otdd_flash.commands.start import run_command, run_hydra, run_script

main = partial(run_hydra, "shift", "shift")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
