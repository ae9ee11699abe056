"""Cache-sized tiles of padded problems (S, n, m), and how problems move within their memory.

Both are for `stored_segments` and `anchored_segments`, whose passes read costs tile by tile, and
which move the problems that are not done to the front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.operators.torch_operator import TILE_ELEMENTS_CPU, TILE_ELEMENTS_GPU


def moved(values: Tensor, order: Tensor) -> Tensor:
    """Rows `order` of a large tensor within its own memory: only those not in place are copied."""
    places = torch.arange(len(order), device=order.device)
    free = torch.nonzero(order != places).squeeze(1)
    values[free] = values[order[free]]
    return values[: len(order)]


def tiles(
    size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut (S, n, m) into cache-sized tiles of whole problems, or of rows of one, with scratch."""
    count, n, m = size
    budget = TILE_ELEMENTS_GPU if device.type == "cuda" else TILE_ELEMENTS_CPU
    together, height = max(1, min(count, budget // (n * m))), max(1, min(n, budget // m))
    scratch = torch.empty(together * height * m, dtype=dtype, device=device)
    for first in range(0, count, together):
        segments = slice(first, min(first + together, count))
        for top in range(0, n, height):
            rows = slice(top, min(top + height, n))
            shape = (segments.stop - first, rows.stop - top, m)
            yield segments, rows, scratch[: shape[0] * shape[1] * m].view(shape)
