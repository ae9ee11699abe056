"""Refusals: tables of them, and random problems, which may be refused, but hardly ever."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from otdd_flash.errors import InputError

Found = TypeVar("Found")

MOST = 0.1


@contextmanager
def naming(name: Any) -> Iterator[None]:
    """Name the case of a loop in whatever it fails with."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise


class Refusals:
    """Counts solves and refusals.

    Args:
        sentence: what every refusal has to say.
    """

    def __init__(self, sentence: str) -> None:
        self._sentence, self._tried, self._refused = sentence, 0, 0

    def outcome(self, solve: Callable[[], Found]) -> Found | None:
        """What a solve gives, or None if it is refused."""
        self._tried += 1
        try:
            return solve()
        except InputError as error:
            assert re.search(self._sentence, str(error)), str(error)  # noqa: PT017
            self._refused += 1
            return None

    def check(self) -> None:
        """Fails if nothing was tried, or too much was refused."""
        assert self._tried > 0
        assert self._refused <= MOST * self._tried, f"{self._refused} of {self._tried} refused"
