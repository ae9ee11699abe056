"""Which quasi-Newton steps are kept, of one problem or of many side by side.

A plain Sinkhorn update raises the dual by at least a known amount, the gain. A quasi-Newton step is
kept if it raises the dual by that much, and otherwise taken back. After a step that was taken back
come plain updates: one, then two after the next such step, then four; steps that certainly gain
something halve the number again. Near convergence the gain is smaller than the rounding error of
the dual, and the dual cannot tell whether a step gained it. Such a step is kept while the marginal
error is at most `GROWTH` times its lowest, and the lowest is not older than `PATIENCE` iterations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from otdd_flash.engine.numbers import Numbers, clamp, constant, negation, where

# How far the marginal error may grow over its lowest where the dual cannot tell, and for how long.
GROWTH = 4.0
PATIENCE = 10.0


class Trust(NamedTuple):
    """Where problems stand, () or (S,) float64 each.

    Attributes:
        dual: dual value of the potentials that were kept last.
        gain: what the plain update adds to it at the least.
        lowest: the lowest marginal error that was kept since the last restart.
        stale: iterations since it was found.
        plain: plain updates to come.
        penalty: how many follow the next step that is not kept.
    """

    dual: Numbers
    gain: Numbers
    lowest: Numbers
    stale: Numbers
    plain: Numbers
    penalty: Numbers

    @classmethod
    def fresh(cls, like: Numbers) -> Trust:
        """Start with nothing known of S problems, `like` being of shape (S,)."""
        zero, infinity = constant(like, 0.0), constant(like, math.inf)
        return cls(-infinity, zero, infinity, zero, zero, zero + 1)

    def restarted(self, changed: Numbers) -> Trust:
        """Start afresh the problems where the flags (S,) are set."""
        fresh = Trust.fresh(self.dual)
        return Trust(*(where(changed, a, b) for a, b in zip(fresh, self, strict=True)))

    def judge(self, dual: Numbers, gain: Numbers, gap: Numbers, slack: Numbers) -> Judgement:
        """Keep the potentials that were just evaluated or not.

        Args:
            dual: theirs.
            gain: theirs.
            gap: their marginal error.
            slack: what a difference of duals may be off by.
        """
        plain, lower = self.plain > 0, gap < self.lowest
        surplus = dual - self.dual - self.gain
        better, level = surplus > slack, surplus >= -slack
        steady = (gap <= GROWTH * self.lowest) & (self.stale < PATIENCE)
        kept = plain | (self.dual == -math.inf) | better | (level & steady)
        # Trust comes back with a step that certainly gained something.
        forgiven = kept & negation(plain) & (better | lower)
        penalty = where(forgiven, clamp(self.penalty / 2, 1.0), self.penalty)
        trust = Trust(
            where(kept, dual, self.dual),
            where(kept, gain, self.gain),
            where(kept & lower, gap, self.lowest),
            where(kept & lower, 0.0, self.stale + 1),
            where(kept, clamp(self.plain - 1, 0.0), penalty),
            where(kept, penalty, 2 * penalty),
        )
        return Judgement(kept, trust)


class Judgement(NamedTuple):
    """Which potentials are kept, () or (S,) bool, and where their problems stand then."""

    kept: Numbers
    trust: Trust
