"""The blocks of a class table W, of which [x, x] and [y, y] must not change when transposed.

`operators.comparison` cuts a table into its blocks here, on the device; `labels.table` holds one
with its names and bounds, and symmetrises by the same rule, as recorded solves do.

A self term OT(x, x) has one potential for both of its sides. That potential is optimal only if the
cost is the same in both directions, so a block W that is not symmetric would give a wrong value and
bounds that prove nothing. What rounding leaves of an asymmetry is averaged out: the cost is that of
(W + W^T) / 2, which is W itself, to the last bit, where W is symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.real_numbers import in_double, real_tensor

# Entries come from sums of squares of very different sizes: what is this far off, relative to the
# largest entry of a block, is taken for rounding.
ROUNDING = 1e-5

WAY_OUT = (
    "; squared distances are the same both ways: give W with W == W.T, or set debias=False, which "
    "reads the block [x, y] alone"
)


class ClassTable:
    """The class distances between two datasets, checked and on a device, with the blocks of terms.

    Args:
        table: W (V_x + V_y, V_x + V_y), squared distances between all classes, on any device; None
            is 0.
        sizes: V_x and V_y.
        device: where they are needed.

    Attributes:
        given: the table, float64, on the device; None where there was none.

    Raises:
        InputError: the table has another size or is not finite.
    """

    def __init__(self, table: Tensor | None, sizes: tuple[int, int], device: torch.device) -> None:
        self.given = None if table is None else _checked(table, sizes).to(device, torch.float64)
        self._total, self._device = sum(sizes), device
        # The rows and columns that belong to each side.
        self._of = {"x": slice(0, sizes[0]), "y": slice(sizes[0], self._total)}

    @cached_property
    def full(self) -> Tensor:
        """W (V_x + V_y, V_x + V_y), float64; zeros where none was given."""
        if self.given is not None:
            return self.given
        return torch.zeros(self._total, self._total, dtype=torch.float64, device=self._device)

    def block(self, term: str) -> Tensor:
        """Return the block of the term "xy", "xx" or "yy"; [y, x] is never read.

        Raises:
            InputError: the block of a self term is not symmetric.
        """
        return self._given(term) if term == "xy" else self._symmetric[term]

    def _given(self, term: str) -> Tensor:
        """Return a block as it was given."""
        return self.full[self._of[term[0]], self._of[term[1]]]

    def around(self, term: str, block: Tensor) -> Tensor:
        """Return a table of zeros but for a block that is as large as that of a term."""
        table = block.new_zeros(self._total, self._total)
        table[self._of[term[0]], self._of[term[1]]] = block
        return table

    @cached_property
    def _symmetric(self) -> dict[str, Tensor]:
        """The blocks of both self terms; not asked for by a cross term alone."""
        blocks = {term: self._given(term) for term in ("xx", "yy")}
        # A single class is as far from itself both ways.
        several = {term: block for term, block in blocks.items() if len(block) > 1}
        if several:
            # Of both at once: a GPU is waited for.
            gaps = torch.stack([_gap(block) for block in several.values()]).tolist()
            for term, gap in zip(several, gaps, strict=True):
                what = f"the entries [{term[0]}, {term[1]}] of class_table"
                _check_symmetric(what, gap, WAY_OUT)
        return blocks | {term: _averaged(block) for term, block in several.items()}


def _checked(table: Tensor, sizes: tuple[int, int]) -> Tensor:
    """A table of so many classes of either side, all of it finite."""
    table, total = real_tensor("class_table", table), sum(sizes)
    if table.shape != (total, total):
        raise InputError(
            f"class_table must have shape {(total, total)} for {sizes[0]} + {sizes[1]} classes, "
            f"got {tuple(table.shape)}"
        )
    bad = ~torch.isfinite(table)
    if bool(bad.any()):
        row, column = torch.nonzero(bad)[0].tolist()
        raise InputError(
            f"class_table holds {int(bad.sum())} NaN or infinite entries, the first at "
            f"[{row}, {column}]; measure it with otdd.class_distances, or give finite distances"
        )
    return table if table.is_floating_point() else in_double("class_table", table)


def symmetrized(name: str, block: Tensor, *, absolute: float = 0.0, way_out: str = "") -> Tensor:
    """(W + W^T) / 2 of a block of class distances that is symmetric but for rounding.

    Args:
        name: what an error calls the block.
        block: W (V, V), finite.
        absolute: what an entry may differ from its mirror image besides rounding, in units of W.
        way_out: ends the sentence of the error.

    Raises:
        InputError: entries differ by more.
    """
    if len(block) == 1:
        return block
    _check_symmetric(name, _gap(block).tolist(), way_out, absolute)
    return _averaged(block)


def _gap(block: Tensor) -> Tensor:
    """Measure by how much a block differs from its transpose, and its largest entry: (2,)."""
    return torch.stack(((block - block.T).abs().max(), block.abs().max()))


def _check_symmetric(
    name: str, numbers: Sequence[float], way_out: str, absolute: float = 0.0
) -> None:
    """Refuse a block by its `_gap`; arguments as for `symmetrized`."""
    gap, largest = numbers
    if gap > ROUNDING * largest + absolute:
        raise InputError(
            f"{name} must be symmetric, but differ by {gap:.6g} from their transpose{way_out}"
        )


def _averaged(block: Tensor) -> Tensor:
    """(W + W^T) / 2, halved first, so that the sum cannot overflow."""
    return block / 2 + block.T / 2
