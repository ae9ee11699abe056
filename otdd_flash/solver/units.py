"""Units of what a result is linear in, cotangents and right-hand sides.

Their squares are 0 or infinite near the ends of float64, and their products with a plan in float32
long before. In units of the largest entry neither happens.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def largest(*values: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The largest absolute value of all entries, or of those along dimensions, float64.

    It is positive, so that it can be divided by: that of zeros is the smallest normal number of
    their type. NaN where there is one.
    """
    sizes = [torch.linalg.vector_norm(one, torch.inf, dim, dtype=torch.float64) for one in values]
    found: Tensor = reduce(torch.maximum, sizes).clamp_min(torch.finfo(values[0].dtype).tiny)
    return found
