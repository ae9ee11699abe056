"""A matrix in files, as the pieces of them that hold its rows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Rows that lie one after the other in a file, from a byte on."""

    path: Path
    offset: int
    rows: int


class Matrix(NamedTuple):
    """Where a matrix (n, d) is.

    Attributes:
        columns: d.
        dtype: of its numbers.
        pieces: its rows in order.
    """

    columns: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.rows for piece in self.pieces), self.columns

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize
