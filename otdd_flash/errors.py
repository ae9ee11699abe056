"""The exceptions and warnings of otdd_flash.

Everything a user can get wrong ends in an `InputError` with the offending value and the way out. It
is raised where the value enters the package, or, for a user's own code, where that runs
(`UserCodeError`). `commands.outcome` (in a job) and `commands.start` (outside of one) print it
without a traceback of this package and exit with code 2. Any other exception that reaches a
command, except those defined here and limits of the system, is a defect. Messages of `InputError`
and of notices are made safe to print when they are created (`shown`); `commands.messages` does so
for all that commands print. Nearly every module imports this one, so it imports nothing of the
package but `shown`, and no torch.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from otdd_flash.shown import display, sentence

# The folder of this package, with a separator at its end.
HERE = os.path.join(os.path.dirname(__file__), "")

# The exit codes of a command or of a study's unit that an error ends. Users' scripts rely on them,
# so they must not change. A defect is printed with its traceback.
DEFECT, BAD_INPUT = 1, 2
# `solver.require_convergence` was set and not met.
NOT_CONVERGED = 3
# The result was written, but a picture, another file or output could not be.
INCOMPLETE = 4
# `fail_on_shift` was set and a shift was found.
SHIFTED = 5


class InputError(ValueError):
    """A request that cannot be met; the message names the value and what to do about it.

    Messages may hold text that others wrote: they are made safe to print here, once.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(sentence(message))


class UserCodeError(InputError):
    """A user's own function or module raised; that error is the cause and has its traceback."""


class EpsilonOutOfRange(InputError):
    """An epsilon too small, or too large, for the precision.

    Args:
        words: the message, with {name}, {given} (name=value) and, where known, {advised}.
        epsilon: the regularisation, in units of the cost.
        advised: an epsilon that would do, in the same units.
        name: of the setting that the user gave.
        given: its value; None is `epsilon` itself.
    """

    def __init__(
        self,
        words: str,
        epsilon: float,
        advised: float | None = None,
        *,
        name: str = "epsilon",
        given: float | None = None,
    ) -> None:
        self.words, self.epsilon, self.advised = words, epsilon, advised
        given = epsilon if given is None else given
        better = "" if advised is None else f"{advised * (given / epsilon):.2g}"
        self.name, self.given = name, given
        super().__init__(words.format(name=name, given=f"{name}={given:g}", advised=better))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, as other processes raise it too."""
        named = partial(type(self), name=self.name, given=self.given)
        return named, (self.words, self.epsilon, self.advised)


def prefixed(where: str, error: InputError) -> InputError:
    """Return the error with a place before its sentence, to be raised from the error."""
    if isinstance(error, EpsilonOutOfRange):
        # Whoever knows the user's setting and unit may still name these.
        words = f"{where.replace('{', '{{').replace('}', '}}')}: {error.words}"
        return EpsilonOutOfRange(
            words, error.epsilon, error.advised, name=error.name, given=error.given
        )
    kind = UserCodeError if isinstance(error, UserCodeError) else InputError
    return kind(f"{where}: {error}")


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Put a place before the sentence of an `InputError` that is raised inside."""
    try:
        yield
    except InputError as error:
        raise prefixed(where, error) from error


class ConvergenceError(RuntimeError):
    """A tolerance was missed, or potentials are undetermined, with `require_convergence`."""


def exit_code(error: Exception) -> int:
    """Return the exit code that an error gives a command."""
    match error:
        case InputError():
            return BAD_INPUT
        case ConvergenceError():
            return NOT_CONVERGED
        case IncompleteError():
            return INCOMPLETE
        case ShiftFound():
            return SHIFTED
        case _:
            return DEFECT


class ShiftFound(RuntimeError):
    """With `fail_on_shift`: a shift test found a shift; its result has been written."""


class LostRankError(RuntimeError):
    """Another of the processes (ranks) that share the work has ended."""


class LeaderError(LostRankError):
    """Rank 0 ended a computation of all ranks by an error that only it has raised.

    An `InputError` or a `ConvergenceError` of rank 0 is raised by all ranks; any other error of
    rank 0 becomes a `LeaderError` on the other ranks.
    """


class IncompleteError(RuntimeError):
    """A command's result was written, but a file beside it or some printed output was not.

    It is raised at the end; a `MissingFileNotice` has given the reason for each missing file.
    """


class _Notice(UserWarning):
    def __init__(self, message: object = "") -> None:
        super().__init__(sentence(message))


class NotConvergedWarning(_Notice):
    """A tolerance was missed, or potentials are undetermined; bounds of the value hold."""


class DataNotice(_Notice):
    """The data were changed or read differently from the request, as the message says."""


class MissingFileNotice(_Notice):
    """A picture or table beside a result could not be written, as the message says."""


def choose(kind: str, name: str, known: tuple[str, ...]) -> str:
    """Return `name` if it is one of `known`.

    Raises:
        InputError: it is not; the message lists the known names.
    """
    if name not in known:
        raise InputError(f"unknown {kind} {display(repr(name))}; choose one of: {', '.join(known)}")
    return name


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package, however deep inside it this is called."""
    torch = sys.modules.get("torch")
    # PyTorch's frames may be between ours and the caller's: decorators, backward passes.
    there = [] if torch is None else [os.path.join(os.path.dirname(str(torch.__file__)), "")]
    inner = (HERE, *there)
    # Level 1 would be this line, level 2 is its caller's.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(inner)
        # The constructor of a dataclass.
        or (frame.f_code.co_filename, frame.f_code.co_name) == ("<string>", "__init__")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
