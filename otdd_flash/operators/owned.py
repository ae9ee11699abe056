"""The division of a cloud's points among ranks.

Points are sorted by class before they are divided: kernels pad every class to whole blocks of rows,
and a class that one rank has alone is padded once. `parts` divides the sides of a cost by it, and
`sharing` a cloud whose shards it sends to the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.fingerprint import remembered

Rows = slice | Tensor


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
        return ranks.all_to_all(sent)[:, : own.stop - own.start]
