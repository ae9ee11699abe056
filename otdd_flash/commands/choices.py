"""The arguments of a command before Hydra reads them, what a configuration may run, and the help.

The first part refuses arguments that Hydra would misread and lists the choices of groups. The
second, `trusted_configurations`, checks every composed configuration. A folder of configurations
(`--config-dir`, `hydra.searchpath`) may come from others, together with data: its values are
settings, but Hydra builds callbacks, launchers and loggers from it, and some settings name
functions. Those must be given on the command line. Installed packages that add parts are trusted as
far as Python's imports are; choices are also looked for in their folders `conf`, after this
package's own, and checked like all others. The third part, `show_help`, prints the help of a
command with the settings as its arguments compose them. Hydra's own `--help` fills the same
template, but first lists every group of every plugin, which takes as long as everything else.

`commands.start` calls all three, `commands.hydra_errors` uses the lists of choices in its messages,
and `commands.settings` walks a configuration by `leaves`. Values of the environment that a job
copies (`hydra.job.env_copy`) may be secret, so they are replaced by references to them. A new
setting that names code or a destination must be added to `FUNCTIONS` or `DESTINATIONS`, because a
folder of others could set it otherwise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from otdd_flash import conf, plugins
from otdd_flash.checks import path

GROUPS = (
    *("source", "target", "reference", "sample", "tasks", "extractor", "labels", "solver"),
    *("report", "log"),
)

# An option of Hydra, which may be abbreviated to three characters.
RERUN = "--experimental-rerun"

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

# Values that Hydra does not read as a name, and on which it ends with a traceback.
NO_NAME = re.compile(
    r"(null|true|false|nan|inf|[-+]?[\d.].*|'.*'|\".*\"|[\[{$].*|)", re.IGNORECASE | re.DOTALL
)


def refused_argument(arguments: Iterable[str]) -> str | None:
    """Return why an argument such as source=null, source=[3] or ~epsilon is refused, or None."""
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if len(group) > 2 and RERUN.startswith(group):
            return (
                f"{RERUN} unpickles a file, which may run any code; give the arguments in the "
                "run's .hydra/overrides.yaml again"
            )
        if argument.startswith("~"):
            return f"no setting can be deleted; leave {argument} out, or give KEY=VALUE"
        added, group = argument.startswith("+"), group.lstrip("+").strip()
        if not equals or group not in GROUPS:
            continue
        if "[" in value or "{" in value:
            # Hydra composes all choices of a list, and the last one replaces the others.
            return (
                f"{group} takes one choice, got {value}; write {group}=CHOICE with one of "
                f"{', '.join(choices(group))}"
            )
        if any(NO_NAME.fullmatch(choice.strip()) for choice in value.split(",")):
            return f"{group} must be one of {', '.join(choices(group))}, got {value or 'nothing'}"
        for choice in map(str.strip, value.split(",")):
            owners = [
                package for folder, package in folders() if choice in _choices_in(folder, group)
            ]
            if len(owners) > 1:
                return (
                    f"{group}={choice} is a choice of package {' and of package '.join(owners)}, "
                    "and which one is meant nobody can say; remove one of the packages"
                )
        if added:
            return f"{group} has a choice already; write {group}={value}, without the +"
    return None


def with_folders(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with `~` expanded in folders of runs, which Hydra does not do.

    Raises:
        InputError: such a folder is empty, or `~` names no user.
    """
    found = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+").strip() in FOLDERS:
            plain = value.strip()
            if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
                plain = plain[1:-1]
            folder = path(key.lstrip("+").strip(), plain)
            if folder != plain:
                quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
                argument = f"{key}='{quoted}'"
        found.append(argument)
    return found


def twice_given(arguments: Iterable[str]) -> list[str]:
    """Return a sentence for each key that is given more than once; its last value counts."""
    given: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not key.startswith("-"):
            given.setdefault(key.lstrip("+").strip(), []).append(value)
    return [
        f"{key} is given {len(values)} times: {key}={values[-1]}, the last one, is taken"
        for key, values in given.items()
        if len(values) > 1
    ]


def choices(group: str) -> list[str]:
    """Return the names of a group's choices, including those of packages that add parts."""
    return sorted({name for folder, _ in folders() for name in _choices_in(folder, group)})


def folders() -> list[tuple[Path, str]]:
    """Return the folders of choices with their packages, this package's own first."""
    return [(Path(conf.__file__).parent, plugins.OWN), *plugins.folders().items()]


def _choices_in(folder: Path, group: str) -> set[str]:
    return {file.stem for file in folder.joinpath(group).glob("*.yaml")}


# Classes that `_target_` may name anywhere: of this package, Hydra, and Hydra's plugins.
BUILT = (
    "otdd_flash.commands.outcome.Outcome",
    "hydra._internal.core_plugins.",
    "hydra.experimental.callbacks.",
    "hydra_plugins.",
    "optuna.samplers.",
)

LOGGERS = (
    "otdd_flash.commands.messages.SafeFormatter",
    *("logging.StreamHandler", "logging.NullHandler", "logging.Formatter", "colorlog."),
)

STREAMS = ("ext://sys.stdout", "ext://sys.stderr")

LOGGING = ("hydra.hydra_logging.", "hydra.job_logging.")

OUTPUT = "${hydra.runtime.output_dir}/"

ENVIRONMENT = "hydra.job.env_set."

# Settings that name a function to import.
FUNCTIONS = ("extractor.path", "transfer.network.path", "flow.functionals")

# Settings that send the results of a run somewhere.
DESTINATIONS = ("log.uri", "log.online")


@cache
def search_installed() -> None:
    """Let Hydra look for choices in packages that add parts, without importing these."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class InstalledParts(SearchPathPlugin):
        """Adds the folders of the packages installed now."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder, package in plugins.folders().items():
                search_path.append(package, f"file://{folder}")

    Plugins.instance().register(InstalledParts)


@contextmanager
def trusted_configurations() -> Iterator[None]:
    """Check every configuration that Hydra composes before it builds anything from it.

    Raises:
        ConfigCompositionException: a setting that runs code is not from the command line.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import ConfigCompositionException

    load = ConfigLoaderImpl.load_configuration

    def checked(*args: Any, **kwargs: Any) -> DictConfig:
        config = load(*args, **kwargs)
        if (why := untrusted(config)) is not None:
            raise ConfigCompositionException(why)
        # Hydra copies these variables' values into the configuration that it writes to the disk.
        with read_write(config):
            for name in config.hydra.job.env_copy:
                config.hydra.job.env_set[name] = f"${{oc.env:{name}}}"
        return config

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def untrusted(config: DictConfig) -> str | None:
    """Return why a configuration, with Hydra's part, is refused; None if it is accepted."""
    plain: Any = OmegaConf.to_container(config)
    # The container is unresolved: an override that refers to nothing is reported under its own key.
    given = [*plain["hydra"]["overrides"]["hydra"], *plain["hydra"]["overrides"]["task"]]
    named = {override.lstrip("+~").partition("=")[0] for override in given} - {*GROUPS}
    for keys, value in leaves(plain):
        key = _dotted(keys)
        if _runs_code(key, value) and not _is_named(key, named):
            return (
                f"{key}={value} names code or a place for a log, and comes from a folder of "
                "configurations; give it on the command line if you trust it, or leave that "
                "folder out"
            )
    return None


def _is_named(key: str, named: Set[str]) -> bool:
    """Return whether the command line gives a key, or a mapping or list that contains it."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in named)


def _runs_code(key: str, value: Any) -> bool:
    last = key.rpartition(".")[2]
    if not key.startswith("hydra."):
        if key in DESTINATIONS:
            return value not in (None, False)
        functional = key.startswith(FUNCTIONS[2]) and last == "path"
        return value not in (None, "???") and (key in FUNCTIONS or functional)
    if last == "_target_":
        return not str(value).startswith(BUILT)
    if key.startswith(LOGGING):
        return _logs_elsewhere(last, str(value))
    # `hydra.job.env_copy` may pass on what the environment already holds.
    return key.startswith(ENVIRONMENT) and os.environ.get(last) != str(value)


def _logs_elsewhere(last: str, value: str) -> bool:
    """Return whether a key of Python's logging configuration builds or opens something unknown."""
    if last in ("()", "class", "factory"):
        return value != "logging.FileHandler" and not value.startswith(LOGGERS)
    if value.startswith(("ext://", "cfg://")):
        return value not in STREAMS
    return last == "filename" and not (value.startswith(OUTPUT) and ".." not in value)


def leaves(node: Any, *keys: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all values of nested dictionaries and lists with the keys that lead to them."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, *keys, key)
    else:
        yield keys, node


def _dotted(keys: tuple[Any, ...]) -> str:
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")


# The form of a command in the texts, and the beginning of its console command's name.
MODULE, SCRIPT = "python -m otdd_flash.", "otdd-"


def show_help(config_name: str, arguments: Sequence[str]) -> None:
    """Print the help of `config_name`, with the settings that `arguments` lead to."""
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
