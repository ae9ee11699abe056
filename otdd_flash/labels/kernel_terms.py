"""The terms OT_epsilon of many pairs of classes in Triton kernels, float32 (`labels=sinkhorn`).

`labels.sinkhorn_pairs` calls `solve_in_kernels`, which it imports only on a CUDA device with
Triton. Pairs are solved in as few batches as half of the free memory allows. The batch must not
change a pair's numbers, because distances are cached and batches follow from the free memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments, bytes_of, is_small
from otdd_flash.operators.memory import free_memory
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms, solve_self_terms

# Pairs whose sizes are compared at once, some 100 bytes each.
AT_ONCE = 1 << 20


def solve_in_kernels(
    pool: ClassPool,
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve the terms of P pairs of classes of `pool`; other arguments as for `TermSolver`."""
    themselves = bool((pairs[:, 0] == pairs[:, 1]).all())
    solve = solve_self_terms if themselves else solve_cross_terms
    out = torch.zeros(
        (len(SegmentTerms._fields), len(pairs)), dtype=torch.float64, device=pairs.device
    )
    for small, members in _batches(pool, pairs):
        rows, columns = pairs[members].T.contiguous()
        segments = KernelSegments(pool, rows, rows if themselves else columns, small=small)
        terms = solve(segments, epsilon, options, finished)
        for numbers, found in zip(out, terms, strict=True):
            numbers[members] = found
    return SegmentTerms(*out)


def _batches(pool: ClassPool, pairs: Tensor) -> list[tuple[bool, Tensor]]:
    """Group pairs by their kind of tiles, into batches that fit half of the free memory.

    All batches are returned at once: a generator would keep lists of all pairs alive during the
    solves.

    Returns:
        Whether a batch has small tiles, and the positions of its pairs.
    """
    small = torch.empty(len(pairs), dtype=torch.bool, device=pairs.device)
    needed = torch.empty(len(pairs), dtype=torch.int64, device=pairs.device)
    parts = (torch.split(values, AT_ONCE) for values in (pairs, small, needed))
    for some, are_small, bytes_needed in zip(*parts, strict=True):
        sizes = pool.sizes[some]
        are_small.copy_(is_small(sizes))
        bytes_needed.copy_(bytes_of(sizes))
    budget = free_memory(pool.starts.device) // 2
    batches = []
    for kind in (True, False):
        members = torch.nonzero(small == kind).squeeze(1)
        batch = needed[members].cumsum_(0).floor_divide_(budget)
        ends = torch.bincount(batch).tolist()
        batches += [(kind, chosen) for chosen in torch.split(members, ends) if len(chosen)]
    return batches
