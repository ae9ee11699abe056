"""`python -m otdd_flash.study` and the console command `otdd-study`: a study from the command line.

pyproject.toml names `script` as the console command `otdd-study`. `run_hydra` reads conf/study.yaml
and the arguments; `run_work` then imports `commands.study`, which does the work. Imports at the top
must stay light, so that help is shown without importing torch.
"""

from __future__ import annotations

from functools import partial

from otdd_flash.commands.start import run_command, run_hydra, run_script

main = partial(run_hydra, "study", "study")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
