"""The error that tests of Sinkhorn attention allow, on a processor and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def allowed(theirs: Tensor, true: Tensor, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    """Return twice `theirs`, an error of PyTorch's in the same type, and 24 roundings.

    Slopes are differences of products with values, times points of this size; PyTorch's may be
    exact by luck where few are left.
    """
    return 2 * theirs + 24 * UNIT[dtype] * max(size, float(true.abs().max()))
