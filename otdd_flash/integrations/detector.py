"""A detector of shifts for services that see batch after batch: `ShiftDetector`.

It needs no further package, and nothing in this package imports it. Monitors call `score` for a
batch and `reset` for a new stream, so these names and their arguments must stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from otdd_flash.arguments import Count, Share, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.shift.joint import check_permutations, shift_test, spent
from otdd_flash.shift.result import ShiftReport


class ShiftDetector:
    """A shift test of every batch against one reference, with one level for all batches.

    Batch t is tested at alpha / (t (t + 1)), so that the probability of a false alarm in any batch
    is at most `alpha`; permutations are raised to what that level takes. Where it takes more than
    100,000, after 70 batches at 0.05, `score` refuses: take larger batches, or start a new stream.

    Args:
        reference: rows as they should be, as `shift_test` takes them.
        alpha: the level of all batches together.
        permutations: of a batch at least.
        **settings: further keywords of `shift_test`.

    Attributes:
        seen: how many batches were scored.

    Raises:
        InputError: a value is out of range, or the reference is not one of samples.
    """

    # `takes` checks arguments by their annotations.
    @takes()
    def __init__(
        self,
        reference: Samples,
        *,
        alpha: Share = 0.05,
        permutations: Count = 999,
        **settings: Any,
    ) -> None:
        check_permutations(permutations)
        self.reference = as_samples(reference, "reference")
        self.alpha, self.permutations, self.settings = alpha, permutations, settings
        self.seen = 0

    def score(self, batch: Samples, groups: Sequence[Any] | None = None) -> ShiftReport:
        """Test a batch; `.shifted` of the report compares its p-value with the batch's own level.

        Args:
            batch: rows of the same features, as `shift_test` takes them.
            groups: two sequences, as in `shift_test`.

        Raises:
            InputError: as `shift_test`; the batch then does not count as seen.
        """
        level, needed = spent(self.alpha, self.seen + 1, self.permutations)
        settings = {**self.settings, "alpha": level, "permutations": needed, "groups": groups}
        report = shift_test(self.reference, batch, **settings)
        self.seen += 1
        return report

    def reset(self) -> None:
        """Start a new stream: the next batch has the level of a first one."""
        self.seen = 0
