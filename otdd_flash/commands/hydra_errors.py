"""What Hydra found wrong with the arguments, as one sentence with a way out that works here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import Container, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from otdd_flash import conf

# Advice of Hydra's to write +KEY=VALUE: keys are fixed here, and an added one is refused.
ADVICE = "To append"
TWICE = re.compile(r"Multiple values for (\S+)\.")


def sentence(error: Exception) -> str:
    """What is wrong, in one line."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return unknown_key(cause.full_key, _root(cause))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = ", ".join(error.options)
        close = _listed(get_close_matches(choice, error.options))
        return f"{group} has no choice {choice!r}{close}; choose one of: {options}"
    if twice := TWICE.match(str(error)):
        return f"{twice[1]} has a choice already; write {twice[1]}=CHOICE, without the +"
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(ADVICE))


def unknown_key(key: str, config: Any) -> str:
    """That there is no such key, and which ones may be meant.

    Args:
        key: dotted.
        config: a configuration with the keys that there are.
    """
    parent, _, last = key.rpartition(".")
    if choices := _choices_with(parent, last):
        more = " or ".join(f"{parent}={choice}" for choice in choices)
        return f"this choice of {parent} has no {key}; choose {more}, or leave it out"
    known = [name for name in _names(config) if name != key]
    if not key.startswith("hydra."):
        known = [name for name in known if not name.startswith("hydra")]
    beside = {_last(name): name for name in known if name.rpartition(".")[0] == parent}
    elsewhere = {} if parent and beside else {_last(name): name for name in known}
    close = (
        [name for end, name in elsewhere.items() if end == last]
        or [beside[name] for name in get_close_matches(last, beside)]
        or [name for end, name in beside.items() if end.startswith(last)]
        or [elsewhere[name] for name in get_close_matches(last, elsewhere, cutoff=0.7)]
    )
    return f"there is no setting {key}{_listed(close)}; --help explains all of them"


def _choices_with(group: str, key: str) -> list[str]:
    """The choices of a group that have a key."""
    folder = "dataset" if group in ("source", "target") else group
    files = sorted((Path(conf.__file__).parent / folder).glob("*.yaml")) if group else []
    return [path.stem for path in files if key in OmegaConf.load(path)]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _listed(names: list[str]) -> str:
    return f" (did you mean {' or '.join(names[:3])}?)" if names else ""


def _root(error: OmegaConfBaseException) -> Any:
    node = error.parent_node
    while isinstance(node, Container) and node._get_parent() is not None:
        node = node._get_parent()
    return node


def _names(config: Any) -> Iterator[str]:
    """All dotted keys, inner ones too."""
    if config is None:
        return
    pending: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=False))]
    while pending:
        start, node = pending.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                yield f"{start}{name}"
                pending.append((f"{start}{name}.", value))
