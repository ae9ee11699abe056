"""The regularisation as the user gave it, and errors for one that the arithmetic cannot hold.

Errors name the setting and the unit in which it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from otdd_flash.errors import EpsilonOutOfRange, InputError

# Of the mean cost: the regularisation where none is given.
DEFAULT_RELATIVE = 0.01
# What it was in earlier versions, in units of the cost.
EARLIER_DEFAULT = 0.1


def refuse_both(epsilon: float | None, relative: float | None) -> None:
    """Refuse two regularisations, of which one would have to win.

    Raises:
        InputError: both are given.
    """
    if epsilon is not None and relative is not None:
        raise InputError(
            "give epsilon or epsilon_relative, one of them; got both, "
            f"epsilon={epsilon:g} and epsilon_relative={relative:g}"
        )


def once_default(epsilon: object) -> str:
    """How to go on from what an earlier version computed by its default, "" for another value."""
    if epsilon != EARLIER_DEFAULT:
        return ""
    return (
        f"; {EARLIER_DEFAULT} was the default of earlier versions, which epsilon={EARLIER_DEFAULT} "
        "gives today"
    )


def settled_epsilon(
    epsilon: float | None, relative: float | None, mean_cost: Callable[[], float]
) -> tuple[str, float, float]:
    """Return the setting's name, its value, and the regularisation in units of the cost.

    Where neither is given it is `DEFAULT_RELATIVE` of the mean cost, and 1 where that is 0, as for
    a cost without any extent.

    Args:
        epsilon: in units of the cost, or None.
        relative: as a multiple of the mean cost, or None.
        mean_cost: computes the mean cost; called unless `epsilon` is given.

    Raises:
        InputError: both are given, or `relative` with a mean cost that is not positive.
    """
    refuse_both(epsilon, relative)
    if epsilon is not None:
        return "epsilon", epsilon, epsilon
    mean = mean_cost()
    if relative is None:
        value = DEFAULT_RELATIVE * mean
        # NaN is left to those who say where it comes from.
        return "epsilon_relative", DEFAULT_RELATIVE, 1.0 if value <= 0 else value
    if not mean > 0:
        raise InputError(
            f"epsilon_relative needs a positive mean cost; here it is {mean:g}: set epsilon"
        )
    return "epsilon_relative", relative, relative * mean


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


@contextmanager
def regularised(
    epsilon: float | None,
    relative: float | None,
    mean_cost: Callable[[], float],
    standardized: float,
) -> Iterator[float]:
    """Settle the regularisation of datasets, and name it in errors of the block as it was given.

    Arguments and errors as for `settled_epsilon` and `epsilon_of_datasets`.
    """
    name, given, used = settled_epsilon(epsilon, relative, mean_cost)
    with epsilon_of_datasets(name, given, used, mean_cost, standardized):
        yield used


@contextmanager
def epsilon_of_datasets(
    name: str, given: float, epsilon: float, mean_cost: Callable[[], float], standardized: float
) -> Iterator[None]:
    """`epsilon_given_as`, with the ways out that datasets have beside another value.

    Args:
        name: of the setting.
        given: its value.
        epsilon: the regularisation that it means.
        mean_cost: computes the mean cost; called where that epsilon is too small.
        standardized: about what the mean cost is of standardized features.

    Raises:
        EpsilonOutOfRange: as it was raised inside, with these.
    """
    with epsilon_given_as(name, given, epsilon):
        try:
            yield
        except EpsilonOutOfRange as error:
            if error.advised is None or error.epsilon != epsilon:
                raise
            mean, ways = mean_cost(), ""
            if name == "epsilon" and DEFAULT_RELATIVE * mean >= error.advised:
                ways += f", or give epsilon_relative={DEFAULT_RELATIVE} in its place"
            if name == "epsilon" and epsilon * mean >= error.advised * standardized:
                ways += (
                    ", or standardize the features (extractor.standardize=true, in Python "
                    "otdd.extractors.standardize)"
                )
            raise EpsilonOutOfRange(error.words + ways, error.epsilon, error.advised) from None


def or_double(dtype: torch.dtype) -> str:
    """The way out by float64, in a list of ways, where it is not what was refused."""
    return "" if dtype == torch.float64 else ", set precision=double"
