"""What of a configuration runs code, and where it may come from.

A folder of configurations (`--config-dir`, `hydra.searchpath`) may have come with the data, from
others. Its values are settings, but Hydra builds callbacks, launchers and loggers from it, and some
settings name functions. Those are the user's to name: on the command line, or not at all.

Installed packages that add parts are trusted as far as Python's imports are. Choices are also
looked for in their folders `conf`, after this package's own, and checked like all others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from otdd_flash import plugins
from otdd_flash.commands.choices import GROUPS

# Classes that `_target_` may name anywhere: of this package, of Hydra, and of plugins of Hydra.
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
# Settings that name a function to be imported.
FUNCTIONS = ("extractor.path", "transfer.network.path", "flow.functionals")
# Settings that send what a run has computed somewhere.
DESTINATIONS = ("log.uri", "log.online")


@cache
def search_installed() -> None:
    """Let Hydra look for choices in packages that add parts, of which it imports nothing."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class InstalledParts(SearchPathPlugin):
        """Adds the folders of this moment."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder, package in plugins.folders().items():
                search_path.append(package, f"file://{folder}")

    Plugins.instance().register(InstalledParts)


@contextmanager
def trusted_configurations() -> Iterator[None]:
    """Check every configuration that Hydra composes before it builds anything from it.

    Raises:
        ConfigCompositionException: something that runs code is not from the command line.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import ConfigCompositionException

    load = ConfigLoaderImpl.load_configuration

    def checked(*args: Any, **kwargs: Any) -> DictConfig:
        config = load(*args, **kwargs)
        if (why := untrusted(config)) is not None:
            raise ConfigCompositionException(why)
        return config

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def untrusted(config: DictConfig) -> str | None:
    """Why a configuration with Hydra's part is refused; None where it is not."""
    plain: Any = OmegaConf.to_container(config)
    # As they are written: an override whose value refers to nothing is for its own key to report.
    given = [*plain["hydra"]["overrides"]["hydra"], *plain["hydra"]["overrides"]["task"]]
    named = {override.lstrip("+~").partition("=")[0] for override in given} - {*GROUPS}
    for key, value in _leaves(plain, ""):
        if _runs_code(key, value) and not _is_named(key, named):
            return (
                f"{key}={value} names code or a place for a log, and comes from a folder of "
                "configurations; give it on the command line if you trust it, or leave that "
                "folder out"
            )
    return None


def _is_named(key: str, named: Set[str]) -> bool:
    """Whether the command line gives a key, or a mapping or list that it is part of."""
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
    # What the environment holds already, `hydra.job.env_copy` may give to jobs.
    return key.startswith(ENVIRONMENT) and os.environ.get(last) != str(value)


def _logs_elsewhere(last: str, value: str) -> bool:
    """Whether a key of Python's logging configuration builds or opens what is not known here."""
    if last in ("()", "class", "factory"):
        return value != "logging.FileHandler" and not value.startswith(LOGGERS)
    if value.startswith(("ext://", "cfg://")):
        return value not in STREAMS
    return last == "filename" and not (value.startswith(OUTPUT) and ".." not in value)


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield all values with their dotted keys."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from _leaves(value, f"{key}[{place}]")
    else:
        yield key, node
