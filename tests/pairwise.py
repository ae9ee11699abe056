"""Parameters of a test that meet in all pairs, and not in all combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from allpairspy import AllPairs


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by some combinations that hold every pair of values of two axes.

    A value may be a `pytest.param`, whose marks then are those of its combinations.
    """
    values = [
        [one if isinstance(one, ParameterSet) else pytest.param(one) for one in axis]
        for axis in axes.values()
    ]
    chosen = AllPairs([range(len(axis)) for axis in values])
    rows = [[axis[k] for axis, k in zip(values, row, strict=True)] for row in chosen]
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(one.values[0] for one in row), marks=[mark for one in row for mark in one.marks]
            )
            for row in rows
        ],
        ids=["-".join(one.id or str(one.values[0]) for one in row) for row in rows],
    )


def named(values: Mapping[str, Any]) -> list[ParameterSet]:
    """Values under their names."""
    return [pytest.param(value, id=name) for name, value in values.items()]
