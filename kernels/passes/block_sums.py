"""What a block of a plan adds to a product, by the library's matrix products.

`block_product` and `weighted_product` call `add_columns`; `block_product` and `plan_application`
call `add_halves`.

Shapes: a block (1 or 2, height, width) float16, hi and lo parts; V (m, k), of which the block's
columns are read.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_halves(block: Tensor, halves: tuple[Tensor, Tensor], columns: slice, out: Tensor) -> None:
    """A block's share of Q V, of hi and lo parts of V (m, k), with those of earlier columns.

    One after the other, so that `out` (height, k) float32 has no more columns than V.
    """
    high, low = (part[columns] for part in halves)
    _multiply(block[0], high, out, add=columns.start > 0)
    if len(block) == 2:
        _multiply(block[0], low, out, add=True)
        _multiply(block[1], high, out, add=True)


def add_columns(block: Tensor, values: Tensor, columns: slice, out: Tensor) -> None:
    """Add Q V of all parts with the same columns V (m, k) to `out` (height, k) float32."""
    for k, part in enumerate(block):
        _multiply(part, values[columns], out, add=columns.start + k > 0)


def _multiply(block: Tensor, values: Tensor, out: Tensor, *, add: bool) -> None:
    """Write block @ values to `out`, or add it; float16 in and float32 out."""
    if block.is_cuda:
        if add:
            torch.addmm(out, block, values, out_dtype=torch.float32, out=out)
        else:
            torch.mm(block, values, out_dtype=torch.float32, out=out)
    elif add:
        out.addmm_(block.float(), values.float())
    else:
        torch.mm(block.float(), values.float(), out=out)
