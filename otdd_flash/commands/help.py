"""The help of a command: its own text, then the settings as its arguments compose them.

Hydra's own `--help` fills the same template, but first lists every group of every plugin, which
takes as long as all else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict

# How the texts write a command, and how its console command is called.
MODULE, SCRIPT = "python -m otdd_flash.", "otdd-"


def show_help(config_name: str, arguments: Sequence[str]) -> None:
    """Print the help that `config_name` holds, with the settings that `arguments` lead to."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    with initialize_config_module("otdd_flash.conf", version_base="1.3"):
        config = compose(config_name, overrides=overrides, return_hydra_config=True)
    template = Template(config.hydra.help.template)
    with open_dict(config):
        del config.hydra
    settings = OmegaConf.to_yaml(config, resolve="--resolve" in arguments)
    text = template.safe_substitute(CONFIG=settings)
    if Path(sys.argv[0]).stem.startswith(SCRIPT):
        text = text.replace(MODULE, SCRIPT)
    print(text)
