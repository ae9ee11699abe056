"""The two ratios of the convergence benchmark, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

OURS = ("ours", "ours, labels")
PROBLEM = ("pair", "points", "n", "epsilon_relative")


def find(rows: Sequence[Row], keys: Row) -> Row | None:
    """The row with these entries."""
    return next((row for row in rows if all(row[key] == keys[key] for key in keys)), None)


def problems_of(rows: Sequence[Row]) -> list[Row]:
    """The problems of some rows, in their order."""
    seen = dict.fromkeys(tuple(row[key] for key in PROBLEM) for row in rows)
    return [dict(zip(PROBLEM, values, strict=True)) for values in seen]


def time_ratio(rows: Sequence[Row], problem: Row) -> tuple[str, float, bool] | None:
    """The best peer, its seconds to the target over ours, and whether that is a lower bound only.

    A peer that was given up takes at least as long as it had; one that ended without reaching the
    target, or failed, does not count.
    """
    found = [row for row in rows if all(row[key] == problem[key] for key in PROBLEM)]
    mine = find(found, {"method": "ours"})
    if mine is None or not mine.get("seconds_to_target"):
        return None
    times = [
        (seconds, row["method"], not row.get("seconds_to_target"))
        for row in found
        if row["method"] not in (*OURS, "plain")
        and (seconds := row.get("seconds_to_target") or row.get("at_least_seconds"))
    ]
    if not times:
        return None
    seconds, method, more = min(times)
    return method, seconds / mine["seconds_to_target"], more


def passes_ratio(rows: Sequence[Row], problem: Row) -> tuple[float, bool] | None:
    """Plain updates' passes to the target over ours, and whether that is a lower bound only."""
    mine, plain = (find(rows, {**problem, "method": method}) for method in ("ours", "plain"))
    if mine is None or plain is None or not mine.get("passes_to_target"):
        return None
    if "trace" not in plain:
        return None
    reached = plain["passes_to_target"]
    passes = reached or plain["trace"][-1]["passes"]
    return passes / mine["passes_to_target"], not reached


def summarize(rows: Sequence[Row]) -> list[str]:
    """A line for every problem."""
    lines = []
    for problem in problems_of(rows):
        text = "{pair}, {points}, n = {n}, epsilon {epsilon_relative:g}:".format(**problem)
        time = time_ratio(rows, problem)
        if time is not None:
            method, ratio, more = time
            text += f" {method} takes {'more than ' if more else ''}{ratio:.3g} times our seconds;"
        passes = passes_ratio(rows, problem)
        if passes is not None:
            ratio, more = passes
            text += f" plain updates {'more than ' if more else ''}{ratio:.3g} times our passes"
        lines.append(text)
    return lines
