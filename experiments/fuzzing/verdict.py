"""What came of one attempt, and what counts as a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# What the README promises, without an interruption.
EXIT_CODES = (0, 2, 3, 4)
SECONDS = 120.0


@dataclass(frozen=True)
class Attempt:
    """One command, call, damaged file or kill.

    Attributes:
        kind: what was tried, such as `command` or `damaged checkpoint`.
        what: how to try it again.
        came: what came of it, such as `done`, `refused` or `exit 1`.
        failure: what must not happen, with its detail; None if it did not.
    """

    kind: str
    what: str
    came: str
    failure: str | None = None


def summary(attempts: Iterable[Attempt]) -> dict[str, Any]:
    """Counts by kind and what came, and every failure."""
    attempts = list(attempts)
    kinds = sorted({attempt.kind for attempt in attempts})
    return {
        "attempts": len(attempts),
        "kinds": {
            kind: dict(Counter(a.came for a in attempts if a.kind == kind).most_common())
            for kind in kinds
        },
        "failures": [asdict(attempt) for attempt in attempts if attempt.failure is not None],
    }
