"""OT_epsilon between many pairs of classes in float64, in PyTorch.

Pairs of similar sizes are padded to one shape, their costs stored and updated together. Only a pair
with too many costs to store is solved alone, on costs that are computed again in every pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.stored_segments import SIZE_STEP, StoredSegments
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms, solve_self_terms
from otdd_flash.solver.term.alternating import solve_alternating
from otdd_flash.solver.term.symmetric import solve_symmetric

# Costs of one pair that are stored at most: 2.3 GiB with exponentials and scratch space.
MOST_STORED = 100_000_000
# Costs of pairs that are updated together.
GROUP = 1 << 23


def solve_in_float64(
    classes: Sequence[WeightedPoints],
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """The terms of P pairs; arguments as for `TermSolver`."""
    solve = solve_self_terms if bool((pairs[:, 0] == pairs[:, 1]).all()) else solve_cross_terms
    device = classes[0].points.device
    out = torch.zeros((len(SegmentTerms._fields), len(pairs)), dtype=torch.float64, device=device)
    indices = pairs.tolist()
    for shape, members in _groups([len(cloud.points) for cloud in classes], indices):
        sides = [(classes[indices[p][0]], classes[indices[p][1]]) for p in members]
        if shape[0] * shape[1] > MOST_STORED:
            terms = _solve_streamed(*sides[0], epsilon, options)
            if finished is not None:
                finished(1)
        else:
            terms = solve(StoredSegments(sides, shape), epsilon, options, finished)
        out[:, members] = torch.stack(terms).to(device)
    return SegmentTerms(*out)


def padded_size(size: int) -> int:
    """The length to which a class of `size` points is padded.

    Multiples of 16 up to 128; from there on, four lengths to every power of two, less than a
    quarter more than the size.
    """
    step = max(SIZE_STEP, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def _groups(
    sizes: Sequence[int], pairs: Sequence[Sequence[int]]
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Positions of pairs that are solved together, with the shape of their costs."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, (i, j) in enumerate(pairs):
        by_shape[padded_size(sizes[i]), padded_size(sizes[j])].append(position)
    for shape, members in by_shape.items():
        costs = shape[0] * shape[1]
        together = 1 if costs > MOST_STORED else max(1, GROUP // costs)
        for first in range(0, len(members), together):
            yield shape, members[first : first + together]


def _solve_streamed(
    rows: WeightedPoints, columns: WeightedPoints, epsilon: float, options: Converged
) -> SegmentTerms:
    """The term of one pair of any size."""
    labels = [
        torch.zeros(len(side.points), dtype=torch.int64, device=side.points.device)
        for side in (rows, columns)
    ]
    cost = LabelledCost(
        rows.points,
        columns.points,
        rows.masses,
        columns.masses,
        labels_x=labels[0],
        labels_y=labels[0 if rows is columns else 1],
        class_costs=rows.masses.new_zeros(1, 1),
        lambda_x=1.0,
    )
    operator = StreamedOperator(cost, torch.float64)
    solve = solve_symmetric if rows is columns else solve_alternating
    term = solve(operator, epsilon, options)
    rounding = term.marginal_error if term.stopped_by == "rounding" else 0.0
    numbers = (term.value, *term.bounds, term.marginal_error, rounding, float(term.iterations))
    return SegmentTerms(*torch.tensor(numbers, dtype=torch.float64).unsqueeze(1))
