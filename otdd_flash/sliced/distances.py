"""Sliced dataset distances between all pairs of several labelled datasets.

    s-OTDD^2 = mean over draws of W_2^2(numbers of one dataset, numbers of the other)

after Nguyen et al. 2025, Lightspeed geometric dataset distance via sliced optimal transport. Every
dataset is projected and sorted once per draw, and a pair then costs a subtraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from otdd_flash.arguments.comparisons import SLICED_DISTANCES
from otdd_flash.checks import takes
from otdd_flash.data.given import Samples
from otdd_flash.devices import resolve_device
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.eager import computes
from otdd_flash.labels.many import as_datasets, distinct_names
from otdd_flash.samples import LabeledSamples, check_squares
from otdd_flash.sliced.draws import Draws, draw_all
from otdd_flash.sliced.numbers import Projected
from otdd_flash.sliced.quantiles import squared_distances
from otdd_flash.sliced.result import SlicedResult

# progress(draws done, their total).
Progress = Callable[[int, int], None]

# Of everything that is held for the draws under way.
WORK_BYTES = 2**29
# Matrices of draws by rows that one dataset's sort holds at once, in float64.
BUFFERS = 6


@computes
@takes(SLICED_DISTANCES)
def sliced_distances(
    datasets: Sequence[Samples],
    *,
    projections: int = 10_000,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> SlicedResult:
    """Compare several labelled datasets along random draws, each with each.

    Args:
        datasets: K >= 2 labelled datasets of one dimension, as samples or as arrays (features,
            labels). Weights count; classes need not be the same.
        projections: L, how many draws to take the mean over, at least 2; intervals need 30. Draw k
            is the same whatever L is.
        seed: of the draws.
        device: where to compute; everything is float64.
        progress: called as progress(draws done, their total).

    Raises:
        InputError: a dataset has no labels, dimensions differ, or powers of features overflow.

    Warns:
        DataNotice: there are too few draws for intervals, or few of them carry most of a mean.
    """
    given = as_datasets(datasets, at_least=2)
    check_same_space(given)
    prepared = prepare(given, device)
    found: list[Tensor] = []
    done = 0
    for draws in draw_all(projections, given[0].dim, seed):
        found.append(chunk_distances(prepared, draws))
        done += len(draws.orders)
        if progress is not None:
            progress(done, projections)
    return SlicedResult.of_draws(torch.cat(found, 1), distinct_names(given), seed)


def check_same_space(datasets: Sequence[LabeledSamples]) -> None:
    """Raise an `InputError` unless all datasets have one dimension and finite squares."""
    for other in datasets[1:]:
        check_same_dimension(datasets[0], other)
    check_squares(*datasets)


def prepare(datasets: Sequence[LabeledSamples], device: str) -> list[Projected]:
    """The datasets on a device, ready for draws.

    Raises:
        InputError: there is no such device, or a dataset has no labels.
    """
    place = resolve_device(device)
    return [Projected(samples.to(place)) for samples in datasets]


def chunk_distances(datasets: Sequence[Projected], draws: Draws) -> Tensor:
    """W_2^2 of all pairs along some draws, (K (K - 1) / 2, C) float64 on the CPU.

    Pairs are in the order of `itertools.combinations`. So many draws are held at once as
    `WORK_BYTES` allow.
    """
    sizes = [len(dataset) for dataset in datasets]
    held = 8 * (sum(sizes) + BUFFERS * max(sizes))
    at_once = max(1, WORK_BYTES // held)
    device = datasets[0].features.device
    parts = []
    for start in range(0, len(draws.orders), at_once):
        some = draws.part(start, start + at_once).to(device)
        numbers = [dataset.along(some) for dataset in datasets]
        pairs = [squared_distances(x, y) for x, y in combinations(numbers, 2)]
        parts.append(torch.stack(pairs).cpu())
    return torch.cat(parts, 1)
