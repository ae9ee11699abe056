"""tr (S_i^1/2 S_j S_i^1/2)^1/2 of pairs of covariances, from factors S = F^T F, in batches.

It is the nuclear norm of F_i F_j^T: with polar decompositions F = U S^1/2 that product is
U_i (S_i^1/2 S_j^1/2) U_j^T, whose singular values are those of S_i^1/2 S_j^1/2. No matrix square
root is taken, and rank-deficient classes are nothing special.

The gradient in F_i is P F_j, and in F_j it is P^T F_i, with P the polar factor of F_i F_j^T. Where
the product loses rank the norm has a kink, and P leaves the lost directions out.

A polar factor takes three times as long as a norm, and is computed only for pairs that show in a
gradient: of the masses that optimal transport moves between many classes, most are 0 to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.labels.covariance_factors import UNIT_ROUNDOFF
from otdd_flash.labels.nuclear_norm import by_products, nuclear_norms, polar_factors
from otdd_flash.labels.pair_chunks import chunk_size, equal_chunks
from otdd_flash.labels.pairs import Progress
from otdd_flash.solver.known_gradient import OnceDifferentiable

# Of all products of a chunk together: enough to keep a GPU busy.
FILLING_ENTRIES = 3 * 2**21


def fidelities(
    factors: Sequence[Tensor], pairs: Tensor, progress: Progress | None = None
) -> Tensor:
    """Nuclear norms (P,) of F_i F_j^T, differentiable in the factors.

    Args:
        factors: V matrices (r_c, d) float64.
        pairs: (P, 2) int64, P >= 1, on any device, which orders them.
        progress: called with the number of pairs done and their total; for the gradient again, with
            those that show in it.
    """
    rows = torch.tensor([factor.shape[0] for factor in factors])
    stacks, places = _stacked(factors, rows)
    rows, places = rows.to(pairs.device), places.to(pairs.device)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(pairs))

    device = factors[0].device
    order, values = [], []
    for (fewer, more), positions, chosen in _groups_of_equal_shape(rows, pairs):
        local = places[chosen].to(device)
        order.append(positions)
        values.append(_Fidelities.apply(stacks[fewer], stacks[more], local, report, progress))
    back = torch.argsort(torch.cat(order))
    found = torch.cat(values)[back.to(device)]
    return _InGradients.apply(found, factors, pairs.to(device)) if found.requires_grad else found


def _stacked(factors: Sequence[Tensor], rows: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Factors of r rows as one (k, r, d) for every r, and the place of every class in its own."""
    stacks = {}
    places = torch.empty_like(rows)
    for count in torch.unique(rows).tolist():
        members = torch.nonzero(rows == count).squeeze(1)
        stacks[count] = torch.stack([factors[index] for index in members.tolist()])
        places[members] = torch.arange(len(members))
    return stacks, places


def _groups_of_equal_shape(
    rows: Tensor, pairs: Tensor
) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """For every two numbers of rows: the positions of their pairs, and these, fewer rows first.

    The number of groups depends on the sizes of classes, not on how many there are.
    """
    swap = rows[pairs[:, 0]] > rows[pairs[:, 1]]
    pairs = torch.where(swap.unsqueeze(1), pairs.flip(1), pairs)
    fewer, more = rows[pairs].unbind(1)
    base = int(rows.max()) + 1
    keys, inverse, counts = torch.unique(
        fewer * base + more, return_inverse=True, return_counts=True
    )
    groups = torch.split(torch.argsort(inverse, stable=True), counts.tolist())
    for key, positions in zip(keys.tolist(), groups, strict=True):
        yield divmod(key, base), positions, pairs[positions]


class _InGradients(torch.autograd.Function):
    """Values (P,) of pairs of factors, whose gradient is 0 where nobody could see it.

    A pair of weight w adds w P F_j to the gradient in F_i, at most |w| ||F_j||. Where that is lost
    in the rounding of another pair's share, for both factors, the weight becomes 0.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, factors: Sequence[Tensor], pairs: Tensor) -> Tensor:
        norms = torch.stack([torch.linalg.matrix_norm(factor) for factor in factors])
        moving = torch.tensor([factor.requires_grad for factor in factors], device=norms.device)
        ctx.save_for_backward(norms, moving, pairs)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        norms, moving, pairs = ctx.saved_tensors
        mine, theirs = torch.cat((pairs, pairs.flip(1))).unbind(1)
        added = weights.detach().abs().repeat(2) * norms[theirs] * moving[mine]
        most = torch.zeros_like(norms).scatter_reduce(0, mine, added, "amax")
        seen = (added > UNIT_ROUNDOFF * most[mine]).reshape(2, -1).any(0)
        return torch.where(seen, weights, 0.0), None, None


class _Fidelities(torch.autograd.Function):
    """||F_i G_j||_* for F (k, r, d), G (l, s, d) and indices (P, 2) of their matrices.

    Only F and G are kept for the gradient; products and polar factors live for one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        pairs: Tensor,
        report: Callable[[int], None],
        progress: Progress | None,
    ) -> Tensor:
        ctx.save_for_backward(left, right, pairs)
        ctx.progress = progress
        values = left.new_empty(len(pairs))
        start = 0
        for count, chunk in equal_chunks(pairs, _chunk_size(left, right)):
            first, second = chunk.unbind(1)
            products = left.index_select(0, first) @ right.index_select(0, second).mT
            if not by_products(products):
                # LAPACK goes from matrix to matrix, and copies need not be decomposed.
                products = products[:count]
            values[start : start + count] = nuclear_norms(products)[:count]
            start += count
            report(count)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        left, right, pairs = ctx.saved_tensors
        with torch.no_grad():
            by_left, by_right = _Fidelities._gradients(left, right, pairs, gradient, ctx.progress)
        # Of create_graph=True.
        if torch.is_grad_enabled():
            by_left, by_right = (
                cast(Tensor, OnceDifferentiable.apply(part, gradient, left, right))
                for part in (by_left, by_right)
            )
        return by_left, by_right, None, None, None

    @staticmethod
    def _gradients(
        left: Tensor, right: Tensor, pairs: Tensor, gradient: Tensor, progress: Progress | None
    ) -> tuple[Tensor, Tensor]:
        """Differentiate sum gradient_p norm_p (P,) by F (k, r, d) and by G (l, s, d)."""
        gradient_left, gradient_right = torch.zeros_like(left), torch.zeros_like(right)
        done, shown = 0, gradient != 0
        pairs, gradient = pairs[shown], gradient[shown]
        size = _chunk_size(left, right)
        for chunk, weights in zip(
            torch.split(pairs, size), torch.split(gradient, size), strict=True
        ):
            first, second = chunk.unbind(1)
            ours, theirs = left.index_select(0, first), right.index_select(0, second)
            polar = polar_factors(ours @ theirs.mT) * weights.reshape(-1, 1, 1)
            gradient_left.index_add_(0, first, polar @ theirs)
            gradient_right.index_add_(0, second, polar.mT @ ours)
            done += len(chunk)
            if progress is not None:
                progress(done, len(pairs))
        return gradient_left, gradient_right


def _chunk_size(left: Tensor, right: Tensor) -> int:
    rows, more_rows, dim = left.shape[1], right.shape[1], left.shape[2]
    # The two factors, and the product with what its decomposition needs beside it.
    size = chunk_size((rows + more_rows) * dim + 3 * rows * more_rows, left.device)
    # A few large products fill a GPU, and what is filled up with copies is computed too.
    return min(size, max(1, FILLING_ENTRIES // (rows * more_rows))) if left.is_cuda else size
