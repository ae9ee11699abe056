"""Blocks of streamed points, packed for kernels once and cached in host memory if that has room.

A block is packed on the GPU when it is first streamed, and its packed form is copied to page-locked
host memory. Later half-steps copy that form back and pack nothing; it has half the bytes or fewer
if kernels read one float16 part. Order and labels of the packed rows of every block stay on the
GPU, and so do the norms of those that the host holds. Certificates and plan products stream the
unpacked points and pack them again. If the rows are one block, it stays on the GPU, points and
packed form, until another cost is streamed.

`blocked.BlockedOperator` streams both sides of its cost by `PackedBlocks`. `ring` and `self_share`
make `DeviceBlock`s of their own, and `triton_operator` makes the `Packing`. Caches go by the id of
a `Block`, so blocks must outlive them. Points that are on the device already, such as particles of
a flow, are not held on the host. `tests/operators/test_packed_blocks.py` counts what is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.host_points import Arrived, Block, HostPoints, Tally

if TYPE_CHECKING:
    from otdd_flash.kernels.points.packed_points import Layout, PackedPoints

# Page-locked memory is allocated in slabs of one size, so that the next term can reuse them.
SLAB_BYTES = 1 << 26


class Packing(NamedTuple):
    """How the blocks of a cost are packed.

    Attributes:
        pack: pack(side, labels (k,), points (k, d), layout) returns points in packed form; layout
            is their order if it was computed before, or None.
        parts: number of a coordinate's two float16 parts that softmins read: 1 or 2.
    """

    pack: Callable[[int, Tensor, Tensor, Layout | None], PackedPoints]
    parts: int


class DeviceBlock(NamedTuple):
    """A block of points on the device.

    Attributes:
        block: which points.
        points: (k, d); a meta tensor, without memory, if only their packed form is on the device.
        packed: the packed form; None if operators read points as they are.
        known: cached results of passes for the points.
    """

    block: Block
    points: Tensor
    packed: PackedPoints | None
    known: dict[str, Any] | None = None


class _Held(NamedTuple):
    """The packed form of a block, with its coordinates in pieces of page-locked host memory."""

    without: PackedPoints
    shape: torch.Size
    pieces: list[Tensor]


@dataclass(eq=False)
class _Store:
    """Caches for the blocks of a side, by the id of the `Block`; blocks outlive the store.

    Attributes:
        slabs: host memory for packed forms.
        single: whether the side is one block of rows, which stays on the GPU.
        held: packed forms in host memory.
        known: cached results of passes for the points.
        resident: the single block, while it is on the GPU.
    """

    slabs: Slabs
    single: bool
    held: dict[int, _Held] = field(default_factory=dict)
    known: dict[int, dict[str, Any]] = field(default_factory=dict)
    resident: DeviceBlock | None = None


class PackedBlocks:
    """The blocks of both sides of a cost, streamed to the device.

    Args:
        points: rows and columns; the same object twice for a cloud with itself.
        labels: of the rows and of the columns.
        packing: how blocks are packed; None if operators read points as they are.
        single: whether the rows are one block.
    """

    def __init__(
        self,
        points: tuple[HostPoints, HostPoints],
        labels: tuple[Tensor, Tensor],
        packing: Packing | None,
        *,
        single: bool,
    ) -> None:
        self._points, self._labels, self._packing = points, labels, packing
        streaming = points[0].streaming
        slabs = Slabs(streaming.tally, streaming.host_room)
        rows = _Store(slabs, single)
        self._stores = rows, rows if points[0] is points[1] else _Store(slabs, single=False)

    def for_parts(self, packing: Packing | None) -> PackedBlocks:
        """Return the same blocks for kernels that read other parts; caches are shared."""
        found = copy(self)
        found._packing = packing
        return found

    def beside(self, points: HostPoints, labels: Tensor) -> PackedBlocks:
        """Return the same rows, with their caches, and other columns, without any."""
        found, slabs = copy(self), Slabs(points.streaming.tally, 0)
        found._points, found._labels = (self._points[0], points), (self._labels[0], labels)
        found._stores = self._stores[0], _Store(slabs, single=False)
        return found

    def stream(self, side: int, blocks: Sequence[Block], *, points: bool) -> Iterator[DeviceBlock]:
        """Yield each block while the next is being copied; `points` asks for unpacked points."""
        packing, source, store = self._packing, self._points[side], self._stores[side]
        if not blocks:
            return
        if packing is None:
            for block, there in zip(blocks, source.stream(blocks), strict=True):
                yield DeviceBlock(block, there, None)
            return
        self._make_room()
        if store.resident is not None:
            yield store.resident
            return

        copied: set[int] = set()

        def arrive(block: Block) -> Arrived:
            held = None if points else store.held.get(id(block))
            if held is None:
                return source.arrive(block)
            copied.add(id(block))
            return self._copied(source, held)

        for block, there in zip(blocks, source.stream(blocks, arrive), strict=True):
            held, came = store.held.get(id(block)), id(block) in store.known
            known = store.known.setdefault(id(block), {})
            if held is not None and id(block) in copied:
                packed = replace(held.without, coordinates=there)
                shape = len(held.without.layout.position), source.shape[1]
                # A meta tensor: reading these points raises.
                nowhere = torch.empty(shape, dtype=source.dtype, device="meta")
                yield DeviceBlock(block, nowhere, packed, known)
                continue
            # Without a layout the host waits for the number of padded rows, in every pass.
            layout = known.get("layout")
            packed = packing.pack(side, self._labels[side][block.rows], there, layout)
            known["layout"] = packed.layout
            found = DeviceBlock(block, there, packed, known)
            if store.single:
                store.resident = found
            # A single block is held on the host as well once it had to leave the GPU.
            if held is None and (came or not store.single):
                _hold(store, source, block, packed)
            yield found

    def _make_room(self) -> None:
        """Release the block of another cost that stayed on the device."""
        rows = self._stores[0]
        staying = self._points[0].streaming.staying
        for other in staying:
            if other is not rows:
                other.resident = None
        staying.clear()
        staying.add(rows)

    def _copied(self, source: HostPoints, held: _Held) -> Arrived:
        """Copy the coordinates (2 n, d) of a held block to the device, of one part or of both."""
        assert self._packing is not None
        with source.copying():
            out = torch.empty(held.shape, dtype=torch.float16, device=source.device)
            flat = out.view(torch.uint8).flatten()
            wanted, at = flat.numel() * self._packing.parts // 2, 0
            for piece in held.pieces:
                count = min(len(piece), wanted - at)
                if count <= 0:
                    break
                flat[at : at + count].copy_(piece[:count], non_blocking=True)
                at += count
        source.streaming.tally.copied += wanted
        return Arrived(out, source.copied())


def _hold(store: _Store, source: HostPoints, block: Block, packed: PackedPoints) -> None:
    """Copy a packed block to the host if there is room and its points, unlike particles, stay."""
    if source.on_device:
        return
    flat = packed.coordinates.view(torch.uint8).flatten()
    pieces = store.slabs.take(flat.numel(), pinned=source.is_cuda)
    if pieces is None:
        return
    with source.copying(after=True):
        for piece, part in zip(pieces, torch.split(flat, [len(p) for p in pieces]), strict=True):
            piece.copy_(part, non_blocking=True)
        source.keep(packed.coordinates)
    empty = packed.coordinates[:0]
    without = replace(packed, coordinates=empty.clone())
    store.held[id(block)] = _Held(without, packed.coordinates.shape, pieces)


class Slabs:
    """Host memory in slabs of one size, filled one after the other.

    Args:
        tally: statistics, where the bytes in use are recorded.
        room: bytes that may be allocated.
    """

    def __init__(self, tally: Tally, room: int) -> None:
        self._tally, self._left = tally, room
        self._slab: Tensor | None = None
        self._used, self._taken = 0, 0

    def take(self, count: int, *, pinned: bool) -> list[Tensor] | None:
        """Allocate `count` bytes in pieces, page-locked if `pinned`; None if there is no room."""
        free = 0 if self._slab is None else SLAB_BYTES - self._used
        more = -(-max(0, count - free) // SLAB_BYTES)
        if more * SLAB_BYTES > self._left:
            return None
        pieces: list[Tensor] = []
        while count > 0:
            if self._slab is None or self._used == SLAB_BYTES:
                self._slab = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=pinned)
                self._left -= SLAB_BYTES
                self._used = 0
            size = min(count, SLAB_BYTES - self._used)
            pieces.append(self._slab[self._used : self._used + size])
            self._used += size
            self._taken += size
            count -= size
        self._tally.held = max(self._tally.held, self._taken)
        return pieces
