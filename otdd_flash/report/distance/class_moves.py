"""The few entries of a class coupling that are worth an arrow."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

WORTH_SHOWING = 0.25


class Move(NamedTuple):
    """`mass` of the total goes from class `source` to class `target`."""

    source: int
    target: int
    mass: float


def strongest_moves(coupling: Tensor, limit: int) -> list[Move]:
    """The largest move of every source class, and all that carry a quarter of its mass or more.

    Args:
        coupling: (Vx, Vy) non-negative masses, on the CPU.
        limit: how many to return at most.

    Returns:
        The heaviest first.
    """
    largest = coupling.max(dim=1, keepdim=True).values
    enough = (coupling >= WORTH_SHOWING * coupling.sum(1, keepdim=True)) | (coupling == largest)
    rows, columns = (enough & (coupling > 0)).nonzero(as_tuple=True)
    order = coupling[rows, columns].argsort(descending=True, stable=True)[:limit]
    return [
        Move(int(rows[k]), int(columns[k]), float(coupling[rows[k], columns[k]])) for k in order
    ]
