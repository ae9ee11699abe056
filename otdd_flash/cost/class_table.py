"""The blocks [x, y], [x, x] and [y, y] of a class table W; those of self terms are symmetric.

`operators.comparison` makes a `ClassTable` on the device and takes the blocks of terms from it.
`labels.table`, which holds a table with its names and bounds, symmetrises its blocks by
`symmetrized`. `solver.small.route` checks the symmetry of its tables itself, by the same
`ROUNDING`, so a change of the rule must be made there too (`tests/solver/test_class_tables.py`).

A self term OT(x, x) has one potential for both of its sides. That potential is optimal only if the
cost is the same in both directions, so a block W that is not symmetric would give a wrong value and
bounds that do not hold. An asymmetry within `ROUNDING` is averaged out: the cost is that of
(W + W^T) / 2, which is W itself, to the last bit, where W is symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.real_numbers import in_double, real_tensor

# Largest asymmetry that counts as rounding, over the largest entry of a block. Entries come from
# sums of squares of very different sizes.
ROUNDING = 1e-5

WAY_OUT = (
    "; squared distances are the same both ways: give W with W == W.T, or set debias=False, which "
    "reads the block [x, y] alone"
)


class ClassTable:
    """The class distances between two datasets, checked and on a device, with the blocks of terms.

    Args:
        table: W (V_x + V_y, V_x + V_y), squared distances between all classes, on any device; None
            stands for zeros.
        sizes: V_x and V_y.
        device: of the blocks.

    Attributes:
        given: the table, float64, on the device; None if none was given.

    Raises:
        InputError: the table has another size or is not finite; from `block`, the block of a self
            term is not symmetric.
    """

    def __init__(self, table: Tensor | None, sizes: tuple[int, int], device: torch.device) -> None:
        self.given = None if table is None else _checked(table, sizes).to(device, torch.float64)
        self._total, self._device = sum(sizes), device
        # The range of classes of each side.
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
        """Return a block without symmetrizing it."""
        return self.full[self._of[term[0]], self._of[term[1]]]

    def around(self, term: str, block: Tensor) -> Tensor:
        """Embed a block into a table (V_x + V_y, V_x + V_y) of zeros, at the place of a term's."""
        table = block.new_zeros(self._total, self._total)
        table[self._of[term[0]], self._of[term[1]]] = block
        return table

    @cached_property
    def _symmetric(self) -> dict[str, Tensor]:
        """The blocks of both self terms, symmetrized; never read for a cross term alone."""
        blocks = {term: self._given(term) for term in ("xx", "yy")}
        # A block (1, 1) is symmetric.
        several = {term: block for term, block in blocks.items() if len(block) > 1}
        if several:
            # Both in one transfer, for which the host waits.
            gaps = torch.stack([_gap(block) for block in several.values()]).tolist()
            for term, gap in zip(several, gaps, strict=True):
                what = f"the entries [{term[0]}, {term[1]}] of class_table"
                _check_symmetric(what, gap, way_out=WAY_OUT)
        return blocks | {term: _averaged(block) for term, block in several.items()}


def _checked(table: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return the table as a real tensor; raise an `InputError` for a wrong shape or NaN or inf."""
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


def symmetrized(name: str, block: Tensor, *, absolute: float) -> Tensor:
    """Return (W + W^T) / 2 for a block of class distances that is symmetric up to rounding.

    Args:
        name: of the block, for errors.
        block: W (V, V), finite.
        absolute: asymmetry of an entry that is allowed besides rounding, in units of W.

    Raises:
        InputError: the asymmetry is larger.
    """
    if len(block) == 1:
        return block
    _check_symmetric(name, _gap(block).tolist(), absolute)
    return _averaged(block)


def _gap(block: Tensor) -> Tensor:
    """Return (2,): the largest |W_kl - W_lk| of a block and its largest |W_kl|."""
    return torch.stack(((block - block.T).abs().max(), block.abs().max()))


def _check_symmetric(
    name: str, numbers: Sequence[float], absolute: float = 0.0, way_out: str = ""
) -> None:
    """Raise an `InputError` if `_gap` says that a block is asymmetric, see `symmetrized`."""
    gap, largest = numbers
    if gap > ROUNDING * largest + absolute:
        raise InputError(
            f"{name} must be symmetric, but differ by {gap:.6g} from their transpose{way_out}"
        )


def _averaged(block: Tensor) -> Tensor:
    """Return (W + W^T) / 2, halved first, so that the sum cannot overflow."""
    return block / 2 + block.T / 2
