"""The tensors of an order, put together so that few broadcasts carry them.

A broadcast takes the host and a GPU as long for a number as for many potentials. `ranks` sends the
small tensors of an order, of one device, as one message of bytes, and every large one by itself.
Both sides call `messages` with the same descriptions, so that they agree on what is in which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes up to which a tensor is copied into a message.
SMALL = 2**26
# In a message every tensor begins at a multiple of so many bytes, as kernels want them.
ALIGNED = 256


class Described(NamedTuple):
    """Shape, type and device of a tensor on rank 0."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Described:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def messages(tensors: Sequence[Described]) -> list[list[int]]:
    """Return the places of the tensors that each message carries; none of those without entries."""
    found: list[list[int]] = []
    together: dict[torch.device, list[int]] = {}
    for place, each in enumerate(tensors):
        if each.nbytes > SMALL:
            found.append([place])
        elif each.nbytes > 0:
            together.setdefault(each.device, []).append(place)
    return [*found, *together.values()]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one device into one of bytes; a single one is returned as it is."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    # One operation: `cat` of all, with what each is short of its room.
    padding = torch.empty(ALIGNED, dtype=torch.uint8, device=tensors[0].device)
    parts = []
    for each in tensors:
        content = each.detach().contiguous().reshape(-1).view(torch.uint8)
        parts += [content, padding[: -len(content) % ALIGNED]]
    return torch.cat(parts)


def empty_message(described: Sequence[Described], device: torch.device) -> Tensor:
    """Return an empty tensor for what `packed` makes of tensors, on a device."""
    if len(described) == 1:
        return torch.empty(described[0].shape, dtype=described[0].dtype, device=device)
    size = sum(map(_room, described))
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpacked(message: Tensor, described: Sequence[Described]) -> list[Tensor]:
    """Return the tensors of a message, which share its memory.

    They are no views of it: a change of one in place is none of the others.
    """
    if len(described) == 1:
        return [message]
    found, first = [], 0
    for each in described:
        there = torch.empty(0, dtype=each.dtype, device=message.device)
        stride = torch.empty(each.shape, device="meta").stride()
        place = first // each.dtype.itemsize
        found.append(there.set_(message.untyped_storage(), place, each.shape, stride))
        first += _room(each)
    return found


def _room(each: Described) -> int:
    """Return the bytes that a tensor takes in a message."""
    return -(-each.nbytes // ALIGNED) * ALIGNED
