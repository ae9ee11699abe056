"""An epsilon that the arithmetic cannot hold, in the name and the unit in which it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from otdd_flash.errors import InputError


class EpsilonOutOfRange(InputError):
    """An epsilon too small, or too large, for the precision.

    Args:
        words: the message, with {name}, {given} (name=value) and, where known, {advised}.
        epsilon: the regularisation, in units of the cost.
        advised: one that would do, likewise.
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
        """Other processes raise it too."""
        named = partial(type(self), name=self.name, given=self.given)
        return named, (self.words, self.epsilon, self.advised)


@contextmanager
def epsilon_given_as(name: str, given: float, epsilon: float) -> Iterator[None]:
    """Say of an epsilon that is out of range what the user called it.

    Args:
        name: of the setting.
        given: its value.
        epsilon: the regularisation that it means; others are left to their own names.

    Raises:
        EpsilonOutOfRange: as it was raised inside, under that name.
    """
    try:
        yield
    except EpsilonOutOfRange as error:
        if error.epsilon != epsilon:
            raise
        raise EpsilonOutOfRange(
            error.words, error.epsilon, error.advised, name=name, given=given
        ) from None


def or_double(dtype: torch.dtype) -> str:
    """The way out by float64, in a list of ways, where it is not what was refused."""
    return "" if dtype == torch.float64 else ", set precision=double"
