"""Tensors of rank 0 that change, and of which the other ranks hold copies.

Orders that change such a tensor change its copies alike, and rank 0 then calls `mark_equal`.
PyTorch counts changes of a tensor, so that one which was changed otherwise is sent anew. It counts
none through `.data` or by libraries that share its memory: content tells of what may be changed so.
`flows.run` and `flows.stepping` hold what moves as `Copied`; `ranks` sends it.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.fingerprint import Mark, mark_of_tensors


class Copied:
    """A tensor of which copies are sent when they are needed first.

    Args:
        ranks: that hold them, led by this process.
        tensor: what is copied.
        owner: what changes it; there are copies as long as it lives.
        given: whether its memory is a user's, who may change it as NumPy does; a failed flow, and
            with it its copies, lives as long as somebody keeps the exception.
    """

    def __init__(self, ranks: Ranks, tensor: Tensor, owner: object, *, given: bool = False) -> None:
        self._ranks, self._tensor, self._number = ranks, tensor, ranks.number()
        self._given = given
        self._equal: Mark | None = None
        # The tensor is held here, so that no other one is at its place in memory.
        ranks.copied[id(tensor)] = self
        weakref.finalize(owner, _forget, ranks, id(tensor), self._number)

    @property
    def number(self) -> int | None:
        """What the other ranks call copies that are equal to the tensor; None where they are not.

        Tensors made in inference mode count nothing, and no copy of one is known to be equal.
        """
        equal = self._equal is not None and self._equal == self._mark()
        return self._number if equal else None

    def _mark(self) -> Mark | None:
        """What changes with the tensor; None where nothing does."""
        tensor = self._tensor
        if tensor.is_inference():
            return None
        return mark_of_tensors(tensor) if self._given else (tensor._version,)

    def sent(self) -> int:
        """Return `number`, after sending copies if there are no equal ones."""
        if self.number is None:
            self._ranks.order(_hold_copy, self._number, self._tensor)
            self.mark_equal()
        return self._number

    def mark_equal(self) -> None:
        """Record that the copies have been changed as the tensor was."""
        self._equal = self._mark()


def _hold_copy(ranks: Ranks, number: int, tensor: Tensor) -> None:
    if ranks.rank > 0:
        ranks.held[number] = tensor


def _forget(ranks: Ranks, place: int, number: int) -> None:
    ranks.copied.pop(place, None)
    ranks.drop(number)
