"""The command `python -m otdd_flash.nearest`: which datasets of a library are nearest to one.

pyproject.toml names `script` as the console command `otdd-nearest`. `run_hydra` reads
conf/nearest.yaml and the arguments; `run_work` then imports `commands.nearest`, which does the
work. Imports at the top must stay light, so that help is shown without importing torch.

The function `otdd.nearest` (`ranking.race.nearest`) and this module have one name. Once the module
is imported, as the console command does, Python binds the module to that name in the package. So
the module must stay callable, and calls the function.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from otdd_flash.commands.start import run_command, run_hydra, run_script


class _Module(ModuleType):
    """This module, which is `otdd.nearest` too."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        from otdd_flash.ranking.race import nearest

        return nearest(*args, **given)


sys.modules[__name__].__class__ = _Module


main = partial(run_hydra, "nearest", "nearest")
script = partial(run_script, main)

if __name__ == "__main__":
    run_command(main)
