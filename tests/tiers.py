"""Which parameters of a test wait for `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow(values: Iterable[Any]) -> list[ParameterSet]:
    """Values whose tests are slow."""
    return [pytest.param(value, marks=pytest.mark.slow, id=str(value)) for value in values]
