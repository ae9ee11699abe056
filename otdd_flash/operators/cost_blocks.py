"""A cost as a function that is asked for one block of its matrix after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments.transport import COST_BLOCKS
from otdd_flash.checks import check_fields, shown
from otdd_flash.errors import InputError, UserCodeError

# Entries to ask for at once: functions may take many times as much memory on the way.
BLOCK_ENTRIES_CPU, BLOCK_ENTRIES_GPU = 1 << 20, 1 << 24


@dataclass(frozen=True)
class CostBlocks:
    """A cost matrix C (n, m) that need not be held: its blocks are computed when they are needed.

    Args:
        n: rows.
        m: columns.
        block: called as block(rows, columns) with two slices; returns C[rows, columns], a real
            tensor, the same for the same slices and always on one device.

    Raises:
        InputError: a size is not positive, or `block` is no function.
    """

    n: int
    m: int
    block: Callable[[slice, slice], Tensor]

    def __post_init__(self) -> None:
        check_fields(self, COST_BLOCKS, "costs.")


class AskedCosts:
    """Costs that a function computes again in every pass.

    Args:
        blocks: the function, of which one entry is asked for the type and the device.
        device: where costs are needed; None is where the function leaves them.

    Raises:
        InputError: it does not return real blocks of the right shape, or raises itself.
    """

    def __init__(self, blocks: CostBlocks, device: torch.device | None = None) -> None:
        self._blocks, self.shape = blocks, (blocks.n, blocks.m)
        first = self._ask(slice(0, 1), slice(0, 1))
        self.device = first.device if device is None else device
        kept = first.dtype.is_floating_point
        self.dtype = first.dtype if kept else torch.float64
        self.asked = BLOCK_ENTRIES_CPU if self.device.type == "cpu" else BLOCK_ENTRIES_GPU

    def rows(self, rows: slice) -> Tensor:
        """C[rows]."""
        return self._ask(rows, slice(0, self.shape[1])).to(self.device, self.dtype)

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C (k, l) of some rows (k,) and columns (l,), int64; asks for whole rows."""
        found = torch.empty((len(rows), len(columns)), dtype=self.dtype, device=self.device)
        for place, row in enumerate(rows.tolist()):
            found[place] = self.rows(slice(row, row + 1))[0, columns]
        return found

    def held(self) -> Tensor:
        """C (n, m)."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        n, m = self.shape
        height = max(1, self.asked // m)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            found[rows] = self.rows(rows)
        return found

    def _ask(self, rows: slice, columns: slice) -> Tensor:
        called = f"costs.block({rows.start}:{rows.stop}, {columns.start}:{columns.stop})"
        try:
            block: Any = self._blocks.block(rows, columns)
        except InputError:
            raise
        except Exception as error:
            raise UserCodeError(f"{called} raised {type(error).__name__}: {error}") from error
        shape = rows.stop - rows.start, columns.stop - columns.start
        if not isinstance(block, Tensor) or tuple(block.shape) != shape or block.is_complex():
            raise InputError(f"{called} must return a real tensor {shape}, got {shown(block)}")
        return block.detach()
