"""The sharded points of one side of a cost, in blocks that circulate among ranks.

If kernels pack points, a rank packs its own shard once, and the packed form circulates: 2 bytes a
coordinate, or 4 if kernels read both parts. Labels, order and norms of all packed points stay on
every rank. For certificates and products with the plan the unpacked points circulate. `ring` makes
`RingBlocks` of either side, and `ring_pairs` passes over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Block
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.owned import Rows
from otdd_flash.operators.packed_blocks import DeviceBlock, Packing

if TYPE_CHECKING:
    from otdd_flash.kernels.points.packed_points import PackedPoints
    from otdd_flash.operators.blocked import BlockOperator

# Shapes of the blocks of every rank.
Shapes = list[list[torch.Size]]


class Shard(NamedTuple):
    """A rank's shard of a side (N, d), and facts of all shards.

    Attributes:
        points: (k, d) of this rank.
        first: the first point of the side (1, d).
        blocks: of every rank, in the order of its points.
        labels: (N,) of all points.
        classes: number of classes.
    """

    points: Tensor
    first: Tensor
    blocks: list[list[Block]]
    labels: Tensor
    classes: int


class RingBlocks:
    """The blocks of a side, which circulate among ranks.

    Args:
        ranks: that hold the shards.
        shard: of this rank.
        packing: how blocks are packed; None if operators read points as they are.
        side: 0 for rows of the cost, 1 for columns.
    """

    def __init__(self, ranks: Ranks, shard: Shard, packing: Packing | None, side: int) -> None:
        self._ranks, self._shard, self._packing, self._side = ranks, shard, packing, side
        counts = [count_of(block) for block in shard.blocks[ranks.rank]]
        self._points = list(torch.split(shard.points, counts))
        # Cached results of passes for the points of every rank's blocks.
        self._known: list[list[dict[str, Any]]] = [[{} for _ in held] for held in shard.blocks]
        self._packed: list[list[PackedPoints]] = []
        if packing is not None:
            self._pack(packing)

    def _pack(self, packing: Packing) -> None:
        """Pack this rank's blocks, and exchange order and norms of all packed points."""
        # Triton is not everywhere.
        from otdd_flash.kernels.points.packed_points import arrange

        side, shard, own = self._side, self._shard, self._ranks.rank
        like = packing.pack(side, shard.labels[:1], shard.first, None)
        nothing, none = like.coordinates[:0], like.squares[:, :0]
        for rank, blocks in enumerate(shard.blocks):
            held = []
            for place, block in enumerate(blocks):
                labels = shard.labels[block.rows]
                layout = arrange(labels, shard.classes)
                if rank == own and len(labels) > 0:
                    held.append(packing.pack(side, labels, self._points[place], layout))
                else:
                    held.append(replace(like, layout=layout, coordinates=nothing, squares=none))
            self._packed.append(held)
        squares = [packed.squares for packed in self._packed[own]]
        shapes = [[torch.Size((2, packed.layout.size)) for packed in held] for held in self._packed]
        for rank, came in self._ranks.circulated(squares, shapes):
            self._packed[rank] = [
                replace(packed, squares=norms)
                for packed, norms in zip(self._packed[rank], came, strict=True)
            ]

    def for_parts(self, packing: Packing | None) -> RingBlocks:
        """Return the same blocks for kernels that read other parts; the points are shared."""
        found = copy(self)
        found._packing = packing
        return found

    def some(self, points: Tensor) -> RingBlocks:
        """Restrict every rank's blocks to some points (l,) int64 of the side."""
        shard, first = self._shard, 0
        place, starts = torch.empty_like(shard.labels), [0]
        for blocks in shard.blocks:
            for block in blocks:
                count = count_of(block)
                place[block.rows] = torch.arange(first, first + count, device=place.device)
                first += count
            starts.append(first)
        places, held = place[points], []
        for start, end in itertools.pairwise(starts):
            rows = ((places >= start) & (places < end)).nonzero()[:, 0]
            held.append([Block(rows, rows)])
        rank = self._ranks.rank
        own = shard.points[places[held[rank][0].rows] - starts[rank]]
        some = shard._replace(points=own, blocks=held, labels=shard.labels[points])
        return RingBlocks(self._ranks, some, self._packing, self._side)

    @property
    def own(self) -> list[DeviceBlock]:
        """The blocks of this rank, with their packed form."""
        rank = self._ranks.rank
        packed = self._packed[rank] if self._packing else [None] * len(self._points)
        blocks, known = self._shard.blocks[rank], self._known[rank]
        return [
            DeviceBlock(*each) for each in zip(blocks, self._points, packed, known, strict=True)
        ]

    def circulated(
        self, *, points: bool, count: int | None = None
    ) -> Iterator[tuple[int, list[DeviceBlock]]]:
        """Yield the blocks of `count` ranks, all by default: this rank's, then those after it.

        `points` asks for the unpacked points.
        """
        points = points or self._packing is None
        sent, shapes = self._as_they_are() if points else self._as_packed()
        for rank, came in self._ranks.circulated(sent, shapes, count):
            if rank == self._ranks.rank:
                yield rank, self.own
            else:
                arrived = self._arrived if points else self._arrived_packed
                yield rank, [arrived(rank, place, there) for place, there in enumerate(came)]

    def _as_they_are(self) -> tuple[list[Tensor], Shapes]:
        """Return this rank's unpacked points, and the shapes of every rank's."""
        dim = self._shard.points.shape[1]
        shapes = [
            [torch.Size((count_of(block), dim)) for block in held] for held in self._shard.blocks
        ]
        return self._points, shapes

    def _as_packed(self) -> tuple[list[Tensor], Shapes]:
        """Return this rank's packed parts that softmins read, and the shapes of every rank's."""
        assert self._packing is not None
        own, parts = self._packed[self._ranks.rank], self._packing.parts
        width = own[0].coordinates.shape[1]
        shapes = [
            [torch.Size((parts * packed.layout.size, width)) for packed in held]
            for held in self._packed
        ]
        return [packed.coordinates[: parts * packed.layout.size] for packed in own], shapes

    def _arrived(self, rank: int, place: int, points: Tensor) -> DeviceBlock:
        """Return the block of unpacked points (k, d) that were received."""
        block, known = self._shard.blocks[rank][place], self._known[rank][place]
        packed = self._packed[rank][place] if self._packing else None
        if self._packing is not None and packed is not None and len(points) > 0:
            labels = self._shard.labels[block.rows]
            packed = self._packing.pack(self._side, labels, points, packed.layout)
        return DeviceBlock(block, points, packed, known)

    def _arrived_packed(self, rank: int, place: int, coordinates: Tensor) -> DeviceBlock:
        """Return the block of packed coordinates, in the parts that softmins read."""
        block, known = self._shard.blocks[rank][place], self._known[rank][place]
        shape = count_of(block), self._shard.points.shape[1]
        # A meta tensor: reading these points raises.
        nowhere = self._shard.points.new_empty(shape, device="meta")
        packed = replace(self._packed[rank][place], coordinates=coordinates)
        return DeviceBlock(block, nowhere, packed, known)


def refined_blocks(
    first: BlockOperator, *blocks: RingBlocks
) -> tuple[BlockOperator, list[RingBlocks]]:
    """Return an operator at full accuracy, and blocks with the float16 parts that it reads."""
    found = first.refined
    return found, [each.for_parts(found.packing) for each in blocks]


def cut(rows: Rows, count: int, size: int) -> list[Block]:
    """Cut points into `size` blocks, as even as possible."""
    ends = [place * count // size for place in range(size + 1)]
    found = []
    for first, end in itertools.pairwise(ends):
        if isinstance(rows, slice):
            some: Rows = slice(rows.start + first, rows.start + end)
        else:
            some = rows[first:end]
        found.append(Block(some, some))
    return found


def count_of(block: Block) -> int:
    """Return the number of points of a block, whose rows are a range or indices."""
    rows = block.rows
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
