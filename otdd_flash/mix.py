"""The command `python -m otdd_flash.mix`: weights of sources nearest to a target.

pyproject.toml names `script` as the console command `otdd-mix`. `run_hydra` reads conf/mix.yaml and
the arguments; `run_work` then imports `commands.mix`, which does the work. Imports at the top must
stay light, so that help is shown without importing torch.
"""

from __future__ import annotations

from functools import partial

from otdd_flash.commands.start import run_command, run_hydra, run_script

main = partial(run_hydra, "mix", "mix")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
