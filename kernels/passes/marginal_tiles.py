"""How much of a plan `plan_marginals` computes at a time, by coordinates and digits of a point.

Its rows divide `tiling.BLOCK_ROWS`, as a tile has one class distance where a layout is pure; its
columns are 64 or 128, of which `plan_marginals` takes quarters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from otdd_flash.kernels.tiling import BLOCK_ROWS, Tile

# A chunk of columns, and with it a chunk of rows a multiple as high, are packed at a time. Rows are
# held while all columns pass, so the higher they are the fewer times columns are packed; and with
# few coordinates a launch for narrow chunks takes longer than its work. Sums of columns, of every
# block of rows, take 32 MiB beside the digits.
CHUNK_COLUMNS = 16384
MOST_ROWS = 16384
CHUNK_BYTES = 32 << 20


def chunk_sizes(row_bytes: int) -> tuple[int, int]:
    """Rows and columns whose digits are held at a time, for so many bytes of digits per row.

    Rows are cut evenly, into pieces that may be up to half as high again.
    The first is a multiple of the second, and both are multiples of the widest tile.
    """
    width = CHUNK_COLUMNS
    while width > BLOCK_ROWS and width * row_bytes > CHUNK_BYTES // 2:
        width //= 2
    return width * max(1, min(CHUNK_BYTES // (width * row_bytes), MOST_ROWS // width)), width


class MarginalTile(NamedTuple):
    """Rows of a tile, the rest of it, and the most registers of a thread."""

    rows: int
    tile: Tile
    registers: int | None = None


def marginal_tile(dim: int, digits: int, device: torch.device) -> MarginalTile:
    """The tile for so many coordinates and digits; its depth counts bytes.

    Triton waits for every int8 product. Two programs that share a multiprocessor fill the waits:
    each has half of the registers, so several levels leave room for a smaller tile.
    """
    if device.type != "cuda":
        rows, columns = {1: (128, 128), 3: (64, 128), 4: (64, 64)}[digits]
        return MarginalTile(rows, Tile(columns, 64, rows // 16, 1, descriptors=False))
    if torch.cuda.get_device_capability(device)[0] != 9:
        columns, depth, stages = {1: (128, 64, 3), 3: (64, 64, 2), 4: (64, 32, 3)}[digits]
        return MarginalTile(128, Tile(columns, depth, 8, stages, descriptors=False))
    if digits > 1:
        stages = 2 if digits == 3 and dim <= 64 else 3
        return MarginalTile(64, Tile(128 if digits == 3 else 64, 64, 4, stages, descriptors=True))
    depth, stages = (64, 6) if dim <= 64 else (128, 3)
    return MarginalTile(128, Tile(128, depth, 8, stages, descriptors=True), registers=128)
