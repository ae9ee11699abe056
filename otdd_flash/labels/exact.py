"""Unregularised squared 2-Wasserstein distances between the points of pairs of classes.

POT's network simplex solves one pair at a time on one core. Many pairs are distributed over several
processes (joblib's loky). `labels.metrics` calls `exact_distances` and `exact_parts` for
`labels=exact`.

A change must keep a pair's distance independent of the process that computes it and of the other
pairs, because distances are cached. Sizes and the expected time are checked before any pair is
solved, because many pairs may take hours. The processes end with their parent, even if it is
killed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.errors import InputError
from otdd_flash.labels.pairs import ClassCloud, PairDistances, used_classes
from otdd_flash.memory import free_memory

# The network simplex needs some 50 bytes per pair of points: 25 million pairs take 1.2 GiB.
MAX_PAIRS_OF_POINTS = 25_000_000
BYTES_PER_PAIR_OF_POINTS = 50
MAX_PIVOTS = 100_000_000
# The most hours for all pairs of classes together, divided by the number of processes.
MAX_HOURS = 24.0

# Measured time of a pair on one core: n m d for the costs, (n m)^1.3 for the simplex.
SECONDS_PER_COST = 3e-10
SIMPLEX_SECONDS, SIMPLEX_POWER = 3.2e-9, 1.3
# Starting the processes takes some five seconds, sending one of them a task some milliseconds.
SECONDS_WORTH_PROCESSES = 15.0
SECONDS_PER_TASK = 0.2

Array = NDArray[Any]

logger = logging.getLogger(__name__)


class _Classes(NamedTuple):
    """All classes in three arrays that processes share; class c starts at row starts[c].

    Attributes:
        points: (N, d).
        masses: (N,) float64, summing to 1 within each class.
        starts: (V + 1,).
    """

    points: Array
    masses: Array
    starts: Array

    def rows(self, index: int) -> tuple[Array, Array]:
        """Return points (n, d) and masses (n,) of one class."""
        own = slice(self.starts[index], self.starts[index + 1])
        return self.points[own], self.masses[own]


def exact_distances(
    clouds: Sequence[ClassCloud], pairs: Tensor, *, progress: Progress | None = None
) -> PairDistances:
    """Compute the squared 2-Wasserstein distances of pairs of classes (POT's `emd2`).

    Args:
        clouds: V classes.
        pairs: (P, 2) int64, indices of the classes of each pair.
        progress: called with the number of pairs of classes done and their total.

    Returns:
        P distances, each its own lower and upper bound.

    Raises:
        InputError: classes are too large or pairs too many, or the simplex does not finish.
    """
    values = torch.empty(len(pairs), dtype=torch.float64, device=clouds[0].points.device)
    done = 0
    with closing(exact_parts(clouds, pairs)) as parts:
        for positions, found in parts:
            values[positions] = found
            done += len(positions)
            if progress is not None:
                progress(done, len(pairs))
    return PairDistances.exactly(values)


def exact_parts(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield distances as they are computed: positions (k,) in the list of pairs, distances (k,).

    Closing the generator stops the processes.

    Raises:
        InputError: as `exact_distances`.
    """
    if not len(pairs):
        return
    clouds, pairs = used_classes(clouds, pairs)
    sizes = np.array([len(cloud) for cloud in clouds])
    device = pairs.device
    one, two = pairs.T.cpu().numpy()
    _check_sizes(clouds, one, two)
    seconds = _seconds(sizes[one] * sizes[two], clouds[0].points.shape[1])
    workers = _workers(float(seconds.sum()), int((sizes[one] * sizes[two]).max()))
    _check_hours(float(seconds.sum()) / 3600, workers, len(pairs))
    # The longest pairs first: none is left to a single process at the end.
    order = np.argsort(-seconds, kind="stable")
    tasks = np.split(order, _ends(seconds[order]))
    classes = _gathered(clouds, sizes)
    chosen = np.stack((one, two), 1)
    with closing(_solved(classes, chosen, tasks, workers)) as answers:
        for task, values in answers:
            for (i, j), value in zip(chosen[task], values, strict=True):
                if isinstance(value, str):
                    raise InputError(
                        f"exact transport between class {clouds[i].name} and class "
                        f"{clouds[j].name} did not end well ({value}); use labels=gaussian or "
                        "labels=sinkhorn"
                    )
            found = torch.tensor(values, dtype=torch.float64)
            yield torch.from_numpy(task).to(device), found.to(device)


def _solved(
    classes: _Classes, pairs: Array, tasks: Sequence[Array], workers: int
) -> Generator[tuple[Array, list[float | str]], None, None]:
    """Yield every task with its answers, in the order in which tasks finish."""
    if workers == 1:
        for task in tasks:
            yield _solve(classes, pairs[task], task, None)
        return
    from joblib import Parallel, delayed, parallel_config

    # Loky processes need no `if __name__ == "__main__"` in the user's script, and the next call
    # reuses them.
    with parallel_config(backend="loky", inner_max_num_threads=1):
        pool = Parallel(
            workers, return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs"
        )
    answers = pool(delayed(_solve)(classes, pairs[task], task, os.getpid()) for task in tasks)
    try:
        # Not `yield from`: closing it would close `answers` before the warnings filter below is
        # set.
        for answer in answers:  # noqa: UP028
            yield answer
    finally:
        with warnings.catch_warnings():
            # Cancelling tasks is the purpose of closing.
            warnings.simplefilter("ignore", UserWarning)
            answers.close()


def _solve(
    classes: _Classes, pairs: Array, task: Array, parent: int | None
) -> tuple[Array, list[float | str]]:
    """Return a task with its pairs' distances; a string is POT's reason why it has none."""
    if parent is not None:
        _leave_with(parent)
    return task, [_squared_wasserstein(classes.rows(i), classes.rows(j)) for i, j in pairs]


@cache
def _leave_with(parent: int) -> None:
    """End this process soon after its parent, which may be killed without notice."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _squared_wasserstein(one: tuple[Array, Array], two: tuple[Array, Array]) -> float | str:
    import ot
    from scipy.spatial.distance import cdist

    # Costs are computed from differences, so without cancellation.
    costs = cdist(one[0], two[0], "sqeuclidean")
    # The simplex adds artificial costs above 1; costs far below these would be lost in rounding.
    exponent = np.frexp(costs.max())[1]
    np.ldexp(costs, -exponent, out=costs)
    with warnings.catch_warnings():
        # The log holds the same message as POT's warning, which could not name the classes.
        warnings.simplefilter("ignore")
        value, log = ot.emd2(
            np.array(one[1]),
            np.array(two[1]),
            costs,
            numItermax=MAX_PIVOTS,
            log=True,
        )
    return float(np.ldexp(value, exponent)) if log["warning"] is None else str(log["warning"])


def _gathered(clouds: Sequence[ClassCloud], sizes: Array) -> _Classes:
    points = torch.cat([cloud.points.detach().cpu() for cloud in clouds])
    masses = torch.cat([cloud.masses.cpu() for cloud in clouds])
    return _Classes(points.numpy(), masses.numpy(), np.concatenate(([0], np.cumsum(sizes))))


def _seconds(pairs_of_points: Array, dim: int) -> Array:
    """Return the expected seconds of each pair on one core."""
    simplex: Array = SIMPLEX_SECONDS * pairs_of_points.astype(np.float64) ** SIMPLEX_POWER
    return simplex + SECONDS_PER_COST * dim * pairs_of_points


def _ends(seconds: Array) -> Array:
    """Return where to cut a list of pairs into tasks of about SECONDS_PER_TASK each."""
    task = np.floor(np.cumsum(seconds) / SECONDS_PER_TASK)
    return np.flatnonzero(np.diff(task)) + 1


def _workers(seconds: float, largest: int) -> int:
    """Return the number of processes: one per core, as far as memory holds their largest pair."""
    if seconds < SECONDS_WORTH_PROCESSES:
        return 1
    from joblib import cpu_count

    room = free_memory(torch.device("cpu")) // (BYTES_PER_PAIR_OF_POINTS * largest)
    return int(max(1, min(cpu_count(), room)))


def _check_sizes(clouds: Sequence[ClassCloud], one: Array, two: Array) -> None:
    sizes = np.array([len(cloud) for cloud in clouds])
    largest = int(np.argmax(sizes[one] * sizes[two]))
    pair = sorted((clouds[one[largest]], clouds[two[largest]]), key=len)
    if len(pair[0]) * len(pair[1]) > MAX_PAIRS_OF_POINTS:
        named = " and ".join(f"{cloud.name} ({len(cloud)} samples)" for cloud in pair)
        raise InputError(
            f"labels=exact is too slow for classes as large as {named}: it takes at most "
            f"{MAX_PAIRS_OF_POINTS:,} pairs of points; {_WAYS_OUT}"
        )


def _check_hours(hours: float, workers: int, pairs: int) -> None:
    shared_by = f"{workers} processes" if workers > 1 else "one process"
    logger.info("labels=exact: %d pairs of classes in %s", pairs, shared_by)
    if hours / workers > MAX_HOURS:
        raise InputError(
            f"labels=exact would take about {hours / workers:,.0f} hours for {pairs:,} pairs of "
            f"classes in {shared_by}, more than {MAX_HOURS:g}; {_WAYS_OUT}"
        )


_WAYS_OUT = "use labels=gaussian or labels=sinkhorn, or fewer samples (max_samples)"
