"""Shift tests of features and labels: `shift_test` of two samples, `shift_windows` of a stream.

Under the null hypothesis units (rows, or groups) of both sides are exchangeable. The statistic is
the debiased dataset distance, at class distances W measured once on the pooled classes and an
epsilon that is given or a multiple of the mean cost of all rows. A change must keep both symmetric
in all rows: only then is every permutation a draw from the same law as the rows as they are, and
the p-value valid (`tests/shift/test_shift.py`).

Epsilon is 0.1 of the mean cost by default, not 0.01 as for a distance: a test asks whether laws
differ, not by how much, and a smoother statistic fluctuates less and takes fewer iterations.

The disjoint windows of a stream share one level: window t = 1, 2, ... is tested at alpha / (t (t +
1)) (`spent`). These levels sum to alpha, so the probability of a false alarm in any window of an
endless stream is at most alpha (a union bound: windows share the reference and are not
independent). Permutations are raised so that p can reach the level.

`otdd_flash` exports `shift_test` and `shift_windows`, and `commands.shift` calls both. It and
`integrations.detector` check permutations by `check_permutations`. `integrations.detector` calls
`shift_test` for every batch, at the level that `spent` returns, so that a detector and
`shift_windows` agree.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, Progress, Seed, Share, takes
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, placed, warn
from otdd_flash.labels import Labels, metric_of
from otdd_flash.shift.effect import measure_effect
from otdd_flash.shift.parts import MOST_PERMUTATIONS, class_permutations, shift_parts
from otdd_flash.shift.pooled import PooledCost, permutation_test
from otdd_flash.shift.result import ShiftReport
from otdd_flash.shift.rows import PooledRows
from otdd_flash.solver.term import refuse_both

DEFAULT_RELATIVE = 0.1
FEWEST_PERMUTATIONS = 19


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def shift_test(
    reference: Samples,
    sample: Samples,
    *,
    permutations: Count = 999,
    stop_after: Count | None = None,
    alpha: Share = 0.05,
    groups: Sequence[Any] | None = None,
    labels: Labels = "gaussian",
    parts: bool = True,
    min_effect: Positive | None = None,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative = 0.5,
    ground: Ground = "sqeuclidean",
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> ShiftReport:
    """Test by permutations whether two labelled samples come from one distribution.

    The statistic T is the debiased dataset distance. The p-value is valid at any number of rows if
    rows, or groups, are independent. All computation is in float64.

    Args:
        reference: n labelled rows, as samples, arrays or any dataset of vectors; without labels
            only `labels="none"` applies. Weights belong to rows, and are on one scale for both.
        sample: m rows of the same features; classes of equal name on both sides are one class.
        permutations: B, at least 19 and 1 / alpha - 1; p cannot be below 1 / (1 + B).
        stop_after: h: stop once h permutations had a T as large as the observed one; p is then h
            over the permutations drawn (Besag & Clifford 1991). None: all are drawn.
        alpha: the level of `.shifted` and of the tests of all classes together; the effect gets an
            interval only if the test rejects at this level.
        groups: two sequences, the group of every row of reference and of sample, such as patients,
            documents or days; groups are then exchanged as a whole. None: rows are independent.
        labels: how labels are compared, as in `dataset_distance`. A given table is between the
            classes of both sides, first those of the reference, then those that only the sample
            has: xx, xy and yy are equal.
        parts: whether to test and describe where the shift is.
        min_effect: the effect, as a share of the mean cost, that `.exceeds` compares with.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost of all rows; 0.1 by default.
        lambda_x: weight of the squared distance between features, or of the `ground` cost.
        lambda_y: weight of the squared distance between classes.
        ground: the cost between features, as in `dataset_distance`.
        compute: a device, or options of which only the device is used.
        cache_dir: folder of a database of measured class distances. None: no cache.
        seed: seed of all draws.
        progress: called as progress(permutations done, their total).

    Returns:
        The p-value, effect and parts; `sentences()` puts them in words.

    Raises:
        InputError: the request cannot be met; the message says what to change.

    Warns:
        DataNotice: there are so few rows, or groups, that hardly any p-value can reach `alpha`.
    """
    started = time.perf_counter()
    check_permutations(permutations, alpha)
    refuse_both(epsilon, epsilon_relative)
    options, metric = ComputeOptions.of(compute), metric_of(labels)
    cost = GroundCost(lambda_x, lambda_y, ground)
    if options.group is not None:
        raise InputError("a shift test runs in one process; leave compute.group out")
    cost.check_labels(metric.name)
    reference, sample = as_samples(reference, "reference"), as_samples(sample, "sample")
    rows = PooledRows.of(reference, sample, metric, groups)
    tested = class_permutations(rows, alpha, permutations) if parts else None
    if rows.least_p > alpha:
        warn(
            f"{rows.sizes[0]} and {rows.sizes[1]} {'rows' if groups is None else 'groups'} can be "
            f"exchanged in so few ways that a share of {rows.least_p:.2g} of them gives the same "
            f"distance, and alpha is {alpha:g}; take more of them",
            DataNotice,
        )
    if epsilon is None and epsilon_relative is None:
        epsilon_relative = DEFAULT_RELATIVE
    device = resolve_device(options.device)
    matrix = rows.cost(cost, metric, device, cache_dir)
    pooled = PooledCost(matrix, rows.samples.masses, epsilon, epsilon_relative)
    test = permutation_test(
        pooled, rows, permutations, seed, stop_after=stop_after, progress=progress
    )
    effect = measure_effect(pooled, rows, test, alpha=alpha, seed=seed)
    found = None
    if tested is not None:
        found = shift_parts(pooled, rows, cost, *tested, permutations, seed, stop_after=stop_after)
    ours = int(rows.in_reference.sum())
    return ShiftReport(
        *test,
        permutations,
        alpha,
        effect,
        found,
        min_effect,
        pooled.epsilon,
        pooled.mean,
        metric.name,
        (ours, len(rows) - ours),
        None if groups is None else rows.sizes,
        (reference.name, sample.name),
        time.perf_counter() - started,
    )


def check_permutations(permutations: int, level: float | None = None) -> None:
    """Refuse a number of permutations that is too large, or too small for a level or for any."""
    if not FEWEST_PERMUTATIONS <= permutations <= MOST_PERMUTATIONS:
        raise InputError(
            f"permutations must lie in [{FEWEST_PERMUTATIONS}, {MOST_PERMUTATIONS}], got "
            f"{permutations}; fewer allow no p-value of 0.05, and more add nothing"
        )
    if level is not None and 1 / (1 + permutations) > level:
        raise InputError(
            f"permutations={permutations} allow no p-value as small as {level:g}; set "
            f"permutations={math.ceil(1 / level - 1e-9) - 1}"
        )


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

    The rows of all windows and their levels are checked before the first is tested. Rows that do
    not fill a window are left out, with a notice.

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
