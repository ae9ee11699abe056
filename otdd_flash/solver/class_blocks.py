"""The blocks [x, x] and [y, y] of a class table, which must not change when transposed.

A self term OT(x, x) has one potential for both of its sides. That potential is optimal only if the
cost is the same in both directions, so a block W that is not symmetric would give a wrong value and
bounds that prove nothing. What rounding leaves of an asymmetry is averaged out: the cost is that of
(W + W^T) / 2, which is W itself, to the last bit, where W is symmetric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.errors import InputError

# Entries come from sums of squares of very different sizes: what is this far off, relative to the
# largest entry of a block, is taken for rounding.
ROUNDING = 1e-5


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
    numbers = (block - block.T).abs().max(), block.abs().max()
    gap, largest = torch.stack(numbers).tolist()
    if gap > ROUNDING * largest + absolute:
        raise InputError(
            f"{name} must be symmetric, but differ by {gap:.6g} from their transpose{way_out}"
        )
    # Halved first, so that the sum cannot overflow.
    return block / 2 + block.T / 2
