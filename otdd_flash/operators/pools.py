"""The parts of a small solve, by what its pool holds: stored scores, or a given cost matrix."""

from __future__ import annotations

from torch import Tensor

from otdd_flash.operators.base import Certifiable
from otdd_flash.operators.matrix_pool import MatrixPool, MatrixTerm, PooledMatrix
from otdd_flash.operators.pooled_segments import PooledSegments, ScoredSegments
from otdd_flash.operators.pooled_term import PooledTerm
from otdd_flash.operators.score_pool import Pool, Room, ScorePool


def pool_of(room: Room, place: Tensor) -> Pool:
    """A pool with this room.

    Args:
        room: of a given matrix where `room.dim` is 0, else of points.
        place: (4,) int64 on the device, of the `Place` of a given matrix; else not read.
    """
    return ScorePool(room) if room.dim else MatrixPool(room, place)


def cross_segments(pool: Pool, tables: tuple[Tensor, Tensor]) -> PooledSegments:
    """The cross terms of a pool, for iterations."""
    if isinstance(pool, MatrixPool):
        return PooledMatrix(pool, tables)
    assert isinstance(pool, ScorePool)
    return ScoredSegments(pool, tables, symmetric=False)


def term_of(pool: Pool, name: str) -> Certifiable:
    """The term "xy", "xx" or "yy" of a pool, for certificates."""
    if isinstance(pool, MatrixPool):
        return MatrixTerm(pool)
    assert isinstance(pool, ScorePool)
    return PooledTerm(pool, name)
