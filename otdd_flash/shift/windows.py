"""Shift tests of a stream in disjoint windows of rows, with one level for all of them.

Window t = 1, 2, ... is tested at alpha / (t (t + 1)). These levels sum to alpha, so the probability
of a false alarm in any window of an endless stream is at most alpha (a union bound: windows share
the reference and are not independent). Permutations are raised so that p can reach the level.
`commands.shift` calls `shift_windows`; `integrations.detector` takes `spent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from otdd_flash.arguments import Count, Progress, Share, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, placed, warn
from otdd_flash.labels import metric_of
from otdd_flash.shift.joint import check_permutations, shift_test
from otdd_flash.shift.parts import MOST_PERMUTATIONS, class_permutations
from otdd_flash.shift.result import ShiftReport
from otdd_flash.shift.rows import PooledRows


def spent(alpha: float, window: int, permutations: int) -> tuple[float, int]:
    """Return the level of window t, from 1, and the permutations that can reach it.

    Raises:
        InputError: they are more than any test makes.
    """
    level = alpha / (window * (window + 1))
    needed = max(permutations, math.ceil(1 / level - 1e-9) - 1)
    if needed > MOST_PERMUTATIONS:
        raise InputError(
            f"window {window} is tested at level {level:.2g}, which takes {needed} permutations, "
            f"over {MOST_PERMUTATIONS}; take larger windows, a larger alpha, or a new reference"
        )
    return level, needed


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def shift_windows(
    reference: Samples,
    sample: Samples,
    *,
    window: Count,
    alpha: Share = 0.05,
    permutations: Count = 999,
    groups: Sequence[Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> list[ShiftReport]:
    """Test each disjoint window of a sample against the reference, in the order of its rows.

    All windows are checked before the first is tested. Rows that do not fill a window are left out,
    with a notice.

    Args:
        reference: rows as they should be.
        sample: rows in order of time.
        window: number of rows of a window, at least 2.
        alpha: the level of all windows together; window t has alpha / (t (t + 1)).
        permutations: least number of permutations per window; raised where the level of a window
            needs more.
        groups: as in `shift_test`; a group that lies in two windows is exchanged with each.
        progress: called as progress(windows done, their total).
        **settings: further keywords of `shift_test`; all windows use the same seed.

    Returns:
        A report for each window, with its own level as `alpha`.

    Raises:
        InputError: there is no full window, the last one needs too many permutations, or as
            `shift_test`.
    """
    check_permutations(permutations)
    reference, sample = as_samples(reference, "reference"), as_samples(sample, "sample")
    count, rest = divmod(len(sample), window)
    if window < 2 or count < 1:
        raise InputError(
            f"window={window} must be at least 2 rows and at most the sample's {len(sample)}"
        )
    if groups is not None and len(groups) == 2 and len(groups[1]) != len(sample):
        raise InputError(f"groups of sample must be {len(sample)}, one a row, got {len(groups[1])}")
    spent(alpha, count, permutations)
    if rest:
        warn(f"the last {rest} rows do not fill a window of {window} and are left out", DataNotice)
    metric, parts = metric_of(settings.get("labels", "gaussian")), settings.get("parts", True)
    tests: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for place, start in enumerate(range(0, count * window, window), 1):
        level, needed = spent(alpha, place, permutations)
        rows, own = torch.arange(start, start + window), groups
        if groups is not None and len(groups) == 2:
            own = [groups[0], groups[1][start : start + window]]
        with placed(f"window {place}"):
            pooled = PooledRows.of(reference, sample.take(rows), metric, own)
            if parts:
                class_permutations(pooled, level, needed)
        tests.append((rows, {"alpha": level, "permutations": needed, "groups": own}))
    reports = []
    for place, (rows, levels) in enumerate(tests, 1):
        reports.append(shift_test(reference, sample.take(rows), **settings, **levels))
        if progress is not None:
            progress(place, count)
    return reports
