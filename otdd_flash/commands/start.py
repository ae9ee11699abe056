"""How the process of a command begins and ends.

Nothing is imported before it is needed: help is shown without torch, and Ctrl-C is heard from the
start, also while Hydra and torch are imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from otdd_flash.commands import exit_codes
from otdd_flash.commands.lasting import lasting_output
from otdd_flash.commands.ranks import launched, together

if TYPE_CHECKING:
    from omegaconf import DictConfig

FULL_ERROR = "HYDRA_FULL_ERROR"


def run_hydra(job: Callable[[DictConfig], int], config_name: str) -> None:
    """Hand the arguments of this process to Hydra, which runs `job` for every configuration."""
    import hydra
    from omegaconf import OmegaConf

    # Part of default directories. Kept with the configuration, so that jobs that a launcher runs in
    # other processes agree on it.
    OmegaConf.register_new_resolver("process", os.getpid, use_cache=True, replace=True)
    conceal_environment()
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        from otdd_flash.commands.help import show_help

        show_help(config_name, sys.argv[1:])
        return
    from otdd_flash.commands.choices import refused_choice, twice_given, with_folders
    from otdd_flash.commands.messages import say, say_error
    from otdd_flash.commands.trusted import trusted_configurations
    from otdd_flash.errors import InputError

    if (refusal := refused_choice(sys.argv[1:])) is not None:
        say_error(refusal)
        sys.exit(exit_codes.BAD_INPUT)
    try:
        sys.argv[1:] = with_folders(sys.argv[1:])
    except InputError as error:
        say_error(error)
        sys.exit(exit_codes.BAD_INPUT)
    for notice in twice_given(sys.argv[1:]):
        say("notice", notice, "yellow")
    entry = hydra.main("pkg://otdd_flash.conf", config_name, version_base="1.3")
    with _errors_handed_on(), trusted_configurations():
        entry(job)()


def conceal_environment() -> None:
    """Have what `${oc.env:NAME}` gives printed and kept by nothing in this process."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("oc.env", concealed_variable, replace=True)


def concealed_variable(name: str, *default: str | None) -> str | None:
    """What `${oc.env:NAME}` stands for: its value, which nothing prints or keeps from now on."""
    from omegaconf.resolvers import oc

    from otdd_flash.shown import conceal

    value: str | None = oc.env(name, *default)
    if value is not None and name in os.environ:
        conceal(value, f"${{oc.env:{name}}}")
    return value


def run_command(main: Callable[[], None]) -> None:
    """Call an entry point and leave the process with its jobs' exit code."""
    with lasting_output(), together() if launched() else nullcontext():
        _run(main)


def _run(main: Callable[[], None]) -> None:
    try:
        main()
        from otdd_flash.commands.outcome import Outcome

        sys.exit(Outcome.exit_code)
    except KeyboardInterrupt:
        print("interrupted; what had been written is whole", file=sys.stderr)
        sys.exit(exit_codes.INTERRUPTED)
    except Exception as error:
        _explain(error)
        sys.exit(exit_codes.BAD_INPUT)
    finally:
        from otdd_flash.commands.claims import release_all

        release_all()


@contextmanager
def _errors_handed_on() -> Iterator[None]:
    """Make Hydra raise what it would print, with advice that does not hold here."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _explain(error: Exception) -> None:
    """Print what is wrong with the arguments in a sentence; let any other exception go on."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from otdd_flash.commands.hydra_errors import sentence
    from otdd_flash.commands.messages import say_error

    if os.environ.get(FULL_ERROR) or not isinstance(error, HydraException | OmegaConfBaseException):
        raise error
    say_error(sentence(error))
