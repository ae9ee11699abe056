"""The arguments of a command: checks before Hydra reads them, trust, the help, and Hydra's errors.

The first part refuses arguments that Hydra would misread, expands `~` in folders of runs, and lists
the choices of groups. The second, `trusted_configurations`, checks every configuration that a run
composes. A folder of configurations (`--config-dir`, `hydra.searchpath`) may come from others,
together with data: its values are settings, but Hydra builds callbacks, launchers and loggers from
it, and some settings name functions. These, and classes other than known ones (`BUILT`, `LOGGERS`),
must be given on the command line (`tests/commands/test_command_trust.py`). Installed packages that
add parts are trusted as far as Python's imports are; choices are also looked for in their folders
`conf`, after this package's own, and checked like all others. The third part, `show_help`, prints
the help of a command with the settings as its arguments compose them, and builds nothing from them.
Hydra's own `--help` fills the same template, but first lists every group of every plugin, which
takes as long as everything else. The fourth, `sentence`, says in one sentence what Hydra or the
system refuses, with advice that holds for these commands.

`commands.start` calls all four, `sentence` for every error that ends a command outside its jobs;
`commands.outcome` and `commands.settings` call `check_references`, and `commands.settings` also
`leaves`, `unknown_key` and `given_at`. `limit_of_the_system` recognises full disks, short memory
and the like, also for `commands.outcome`. Values of the environment that a job copies
(`hydra.job.env_copy`) may be secret, so they are replaced by references to them. A new setting that
names code or a destination must be added to `FUNCTIONS` or `DESTINATIONS`, because a folder of
others could set it otherwise. Hydra and OmegaConf report many facts only in the text of their
messages. The patterns before `sentence` match these, and may fail with new versions.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import Container, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from otdd_flash import conf, plugins
from otdd_flash.checks import path
from otdd_flash.errors import InputError

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
        ConfigCompositionException: a setting that runs code, or sends results somewhere, is not
            from the command line.
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


# The groups whose choices are datasets.
DATASETS = ("source", "target", "reference", "sample")

# Hydra's advice to write +KEY=VALUE is wrong here, because keys are fixed.
ADVICE = "To append"
SEVERAL = re.compile(r"Ambiguous value for argument '(.*)'")
ADDED = re.compile(r"Could not append to config\. An item is already at '(\S+)'")
# Hydra merges settings one by one, and names only the one that failed.
MERGED = "Error merging override "
KEY = re.compile(r"[+]{0,2}[a-zA-Z_][\w@/:-]*(\.[\w@/:-]+)*", re.ASCII)
EVALUATED = re.compile(r"\w+ while evaluating .*")
RESOLVING = re.compile(r"\w+ raised while resolving interpolation: ")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
NO_KEY = re.compile(r"Interpolation key '(.*)' not found")
# The most characters shown of an argument and of Hydra's message.
LONGEST = 200
# Modules whose frames show where an error comes from.
OURS, HYDRAS = "otdd_flash", ("hydra", "omegaconf")


def sentence(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return what is wrong in one line; None if neither arguments nor files caused the error."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if (limit := limit_of_the_system(error)) is not None:
        return limit
    match error:
        case InputError():
            return str(error)
        case OverrideParseException():
            return _unreadable(error.override, error.message)
        case MissingConfigException() if error.missing_cfg_file and error.options:
            group, _, choice = error.missing_cfg_file.rpartition("/")
            if (package := _without_yaml(group, choice)) is not None:
                return (
                    f"package {package} has {choice}, but no conf/{group}/{choice}.yaml for the "
                    "command line; tell its makers, or use it from Python"
                )
            options = ", ".join(error.options)
            close = _listed(get_close_matches(choice, error.options))
            return f"{group} has no choice {choice!r}{close}; choose one of: {options}"
        case OSError() if not isinstance(error, HydraException):
            where = f" {error.filename}" if error.filename else ""
            return f"cannot use{where or ' a file'}: {error.strerror or error}"
    match cause:
        case ConfigAttributeError() | ConfigKeyError() if cause.full_key:
            return unknown_key(cause.full_key, _root(cause))
        case InterpolationResolutionError():
            return unresolved(cause, _root(cause))
        case GrammarParseError():
            wrong = next((one for one in arguments if "${" in one), "an argument")
            return (
                f"cannot read the interpolation in {wrong}; ${{KEY}} is the value of another "
                "setting, ${oc.env:NAME} of an environment variable"
            )
        case OmegaConfBaseException() if str(error).startswith(MERGED):
            setting = str(error).removeprefix(MERGED)
            return f"{setting} cannot be set: {str(cause).splitlines()[0]}; leave it out"
    if several := SEVERAL.match(str(error)):
        key, _, values = several[1].partition("=")
        if key in GROUPS:
            return f"{key} takes one choice, got {values}; write {key}=CHOICE, or -m to run each"
        return (
            f"{several[1]} has several values, of which -m runs every combination; write a number "
            f"with a point, a list as {key}=[{values}], a text as {key}='{values}' in quotes of "
            "the shell"
        )
    if added := ADDED.match(str(error)):
        return f"{added[1]} is a setting already; write {added[1]}=VALUE, without the +"
    if isinstance(error, HydraException | OmegaConfBaseException):
        lines = [line.strip() for line in str(error).splitlines()]
        return "; ".join(line for line in lines if line and not line.startswith(ADVICE))
    return _ended_hydra(error, arguments)


def unresolved(error: InterpolationResolutionError, config: Any) -> str:
    """Return which setting refers to something that does not exist, and how.

    Args:
        error: of the reference.
        config: a configuration that contains it.
    """
    key, written = given_at(config, error.full_key or "")
    reason = str(error.msg or error).splitlines()[0]
    reason = RESOLVING.sub("", reason).strip('"')
    reason = NO_KEY.sub(r"there is no setting \1", reason)
    if "Recursive interpolation" in reason:
        reason = "it refers to itself"
    return f"{key}={written} has no value: {reason}; write {key}=VALUE, or set what it refers to"


def given_at(config: Any, key: str) -> tuple[str, Any]:
    """Follow the references of a dotted key; return the last key, and the text given there."""
    plain = None if config is None else OmegaConf.to_container(config, resolve=False)
    followed, written = [key], _entry(plain, key)
    while reference := REFERENCE.fullmatch(str(written)):
        further = _entry(plain, reference[1])
        if reference[1] in followed or not (isinstance(further, str) and "${" in further):
            break
        followed.append(reference[1])
        written = further
    return followed[-1], written


def _entry(plain: Any, key: str) -> Any:
    """Return the entry of nested dictionaries and lists under a dotted key, or None."""
    for part in re.findall(r"[^.\[\]]+", key):
        try:
            plain = plain[int(part) if isinstance(plain, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return plain


def check_references(config: Any) -> None:
    """Raise an `InputError` for a setting with a failing reference to another or to the system."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except InterpolationResolutionError as error:
        raise InputError(unresolved(error, config)) from error
    except GrammarParseError as error:
        raise InputError(str(sentence(error, ()))) from error


def _unreadable(argument: str, message: str) -> str:
    """Return why Hydra cannot parse an argument, and what may be meant."""
    key, equals, value = argument.partition("=")
    shown = repr(argument if len(argument) <= LONGEST else f"{argument[:LONGEST]}...")
    if not equals:
        return f"{shown} sets nothing; write KEY=VALUE"
    if not argument.isprintable():
        return f"cannot read {shown}: it holds a line end or another control character"
    if key != key.strip() and KEY.fullmatch(key.strip()):
        return f"cannot read {shown}; write {key.strip()}={value.strip()}, without spaces"
    if not KEY.fullmatch(key):
        return f"cannot read {shown}: {key!r} is no key; --help explains all of them"
    if evaluated := EVALUATED.search(message):
        return f"cannot read {shown}: {evaluated[0]}"
    # Within quotes, a backslash is only special before a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda run: run[1] * 2 + ("\\'" if run[2] else ""), value)
    return (
        f"cannot read {shown}; close open quotes and brackets, or where they and other "
        f"signs belong to a text, write {key}='{quoted[:LONGEST]}', all of it within quotes of the "
        "shell"
    )


def _ended_hydra(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return which of Hydra's own settings led to an error; None if it was raised elsewhere."""
    modules = (
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    known = [module for module in modules if module in (OURS, *HYDRAS)]
    if not known or known[-1] == OURS:
        return None
    own = [one for one in arguments if one.lstrip("+").startswith(("hydra", "-", "="))]
    why = " ".join(f"{type(error).__name__}: {error}".split())
    shown = " ".join(own or arguments)[:LONGEST]
    return f"Hydra ends on {shown} ({why[:LONGEST]}); leave out what is not needed of it"


def unknown_key(key: str, config: Any) -> str:
    """Return that there is no such key, and which ones may be meant.

    Args:
        key: dotted.
        config: a configuration with the existing keys.
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
        # A key of the command itself may be looked for in a part of it.
        [name for name in known if name == last]
        or [name for end, name in elsewhere.items() if end == last]
        or [beside[name] for name in get_close_matches(last, beside)]
        or [name for end, name in beside.items() if end.startswith(last)]
        or [elsewhere[name] for name in get_close_matches(last, elsewhere, cutoff=0.7)]
    )
    return f"there is no setting {key}{_listed(close)}; --help explains all of them"


def _choices_with(group: str, key: str) -> list[str]:
    if not group:
        return []
    name = "dataset" if group in DATASETS else group
    files = [path for folder, _ in folders() for path in sorted(folder.glob(f"{name}/*.yaml"))]
    return [path.stem for path in files if key in OmegaConf.load(path)]


def _without_yaml(group: str, choice: str) -> str | None:
    """Return the package that adds a part of this name without a choice for the command line."""
    kinds = {
        **dict.fromkeys((*DATASETS, "dataset"), "datasets"),
        "extractor": "extractors",
    }
    found = plugins.parts(kinds.get(group, group)).get(choice, ())
    return found[0].package if found else None


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
    """Yield all dotted keys, including inner ones."""
    if config is None:
        return
    pending: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=False))]
    while pending:
        start, node = pending.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                yield f"{start}{name}"
                pending.append((f"{start}{name}.", value))


# Limits of the system that can end a process anywhere, with what to do about them.
LIMITS = {
    errno.EMFILE: "allow this process more open files (ulimit -n 1024)",
    errno.ENFILE: "end other processes, or raise the limit of the system",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.ENOMEM: "end what else takes memory, or take fewer rows with max_samples=N",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or allow it",
    errno.EPERM: "choose another folder, or allow it",
    errno.EIO: "look after the disk",
}
# Words in errors of libraries, of other types than OSError, that come from these limits.
WORDS = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC)} | {
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    "failed to map segment from shared object": errno.ENOMEM,
    "can't start new thread": errno.ENOMEM,
}


def limit_of_the_system(error: BaseException) -> str | None:
    """Return the limit of the system that an error comes from and the way out; None for others.

    Libraries report such limits by errors of other types, such as an ImportError, with the system's
    words.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        words = f"memory is short ({text})" if text else "memory is short"
        return f"{words}; {LIMITS[errno.ENOMEM]}"
    if isinstance(error, OSError) and error.errno in LIMITS:
        where = f" at {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{where}; {LIMITS[error.errno]}"
    if isinstance(error, OSError | ImportError | RuntimeError):
        for words, number in WORDS.items():
            if words in text:
                return f"{text}; {LIMITS[number]}"
    return None
