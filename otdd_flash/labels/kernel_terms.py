"""OT_epsilon between many pairs of classes in Triton kernels, in float32.

All pairs are one problem, as far as their potentials fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments, bytes_of, is_small
from otdd_flash.operators.memory import free_memory
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms, solve_self_terms


def solve_in_kernels(
    pool: ClassPool,
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """The terms of P pairs; other arguments as for `TermSolver`."""
    themselves = bool((pairs[:, 0] == pairs[:, 1]).all())
    solve = solve_self_terms if themselves else solve_cross_terms
    out = torch.zeros(
        (len(SegmentTerms._fields), len(pairs)), dtype=torch.float64, device=pairs.device
    )
    for small, members in _batches(pool, pairs):
        rows, columns = pairs[members].T.contiguous()
        segments = KernelSegments(pool, rows, rows if themselves else columns, small=small)
        terms = solve(segments, epsilon, options, finished)
        out[:, members] = torch.stack(terms)
    return SegmentTerms(*out)


def _batches(pool: ClassPool, pairs: Tensor) -> Iterator[tuple[bool, Tensor]]:
    """Positions of pairs with the same kind of tiles, and as many as half of the free memory."""
    sizes = pool.sizes[pairs]
    small, needed = is_small(sizes), bytes_of(sizes)
    # The solves are given the memory.
    del sizes
    budget = free_memory(pool.starts.device) // 2
    for kind in (True, False):
        members = torch.nonzero(small == kind).squeeze(1)
        batch = needed[members].cumsum(0) // budget
        for members_of_one in torch.split(members, torch.bincount(batch).tolist()):
            if len(members_of_one):
                yield kind, members_of_one
