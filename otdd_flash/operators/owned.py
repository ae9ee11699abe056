"""The division of a cloud's points among ranks.

Points are sorted by class before they are divided: kernels pad every class to whole blocks of rows,
and a class that one rank has alone is padded once. `parts` divides the sides of a cost by it, and
`sharing` a cloud whose shards it sends to the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.fingerprint import remembered

Rows = slice | Tensor


class _Move(NamedTuple):
    """How this rank's points come to the ranks that own their places in the given order.

    Attributes:
        order: (k,) int64, this rank's rows by the rank that gets them.
        sent: how many rows each rank gets.
        coming: how many come from each rank.
        place: (share,) int64, where every row that comes belongs in the own share.
    """

    order: Tensor
    sent: list[int]
    coming: list[int]
    place: Tensor


@dataclass(frozen=True, eq=False)
class Owned:
    """How the points of one side are divided among ranks.

    Attributes:
        count: number of points.
        order: (count,) int64, the points sorted by class; None if they are sorted already.
        place: (count,) int64, the index of every point in that order.
    """

    count: int
    order: Tensor | None
    place: Tensor | None
    _labels: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
    _moves: dict[tuple[int, int], _Move] = field(default_factory=dict, repr=False)

    @classmethod
    def by_class(cls, labels: Tensor) -> Owned:
        """Divide points in the order of their labels (count,); cached with the labels."""
        return remembered(labels, "owned", lambda: cls._in_order(labels))

    @classmethod
    def _in_order(cls, labels: Tensor) -> Owned:
        if bool((labels[1:] >= labels[:-1]).all()):
            return cls(len(labels), None, None)
        order = torch.argsort(labels, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return cls(len(labels), order, place)

    def of(self, ranks: Ranks, rank: int | None = None) -> Rows:
        """Return the points of a rank, this one by default."""
        share = ranks.share(self.count, rank)
        return share if self.order is None else self.order[share]

    def labels_of(self, ranks: Ranks, labels: Tensor) -> Tensor:
        """Cut the labels (count,) to this rank's points; one tensor for all calls."""
        place = ranks.rank, ranks.size
        if place not in self._labels:
            # Cloned: a view would keep all labels alive.
            self._labels[place] = labels[self.of(ranks)].clone()
        return self._labels[place]

    def gathered(self, ranks: Ranks, found: Tensor) -> Tensor:
        """Gather what all ranks computed for their points, in the points' own order."""
        every = ranks.gathered(found, self.count)
        return every if self.place is None else every[self.place]

    def in_given_order(self, ranks: Ranks, rows: Tensor) -> Tensor:
        """Send rows (k, ...) of this rank's points to the owners of `Ranks.share` in given order.

        Returns:
            (share, ...), the rows of the points at the places that this rank owns.
        """
        if self.order is None:
            return rows
        move = self._move(ranks)
        found = ranks.exchanged_rows(rows[move.order], move.sent, move.coming)
        return torch.empty_like(found).index_copy_(0, move.place, found)

    def _move(self, ranks: Ranks) -> _Move:
        here = ranks.rank, ranks.size
        if here not in self._moves:
            assert self.order is not None
            every = range(ranks.size)
            ends = [ranks.share(self.count, rank).stop for rank in every]
            # Points of every rank in the given order, which is that of their new owners.
            points = [self.order[ranks.share(self.count, rank)].sort() for rank in every]
            borders = self.order.new_tensor([0, *ends])
            counts = torch.stack(
                [torch.searchsorted(each.values, borders).diff() for each in points]
            ).tolist()
            first, end = [0, *ends][ranks.rank], ends[ranks.rank]
            coming = [each.values[(each.values >= first) & (each.values < end)] for each in points]
            self._moves[here] = _Move(
                points[ranks.rank].indices,
                counts[ranks.rank],
                [of_rank[ranks.rank] for of_rank in counts],
                torch.cat(coming) - first,
            )
        return self._moves[here]

    def exchanged(self, ranks: Ranks, partial: Tensor, nothing: float) -> Tensor:
        """Send every rank its points' rows of `partial` (count, ...); return those for own points.

        Returns:
            (size, share, ...), by the rank that computed them.
        """
        partial = partial if self.order is None else partial[self.order]
        width = -(-self.count // ranks.size)
        sent = partial.new_full((ranks.size, width, *partial.shape[1:]), nothing)
        for rank in range(ranks.size):
            share = partial[ranks.share(self.count, rank)]
            sent[rank, : len(share)] = share
        own = ranks.share(self.count)
        each = [1] * ranks.size
        return ranks.exchanged_rows(sent, each, each)[:, : own.stop - own.start]
