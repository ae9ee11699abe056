"""How kernels cut the scores into tiles, and how a tile of coordinates is loaded.

Kernels of `passes` and `segments.step` take tiles and loads from here, but for the sizes of
`plan_marginals` and the loads of `resident_half_step`; `half_step` and `fused_product` also take
their ranges. `points`, `operators.build` and `operators.triton_operator` read `BLOCK_ROWS` or
`BLOCK_COLUMNS`, to which clouds are padded. Hopper and later load tiles through tensor descriptors;
Ampere, Ada and the interpreter through pointers. Sizes were the fastest of those measured on an
H200 and are modest elsewhere; there is no tuning at run time. Tiles must fit the shared memory of
each card (`tests/kernels/test_compilation.py`), and ranges must take every column block of every
row block once (`tests/kernels/test_tiling.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows of a class-pure block, and of a tile of `passes`, but for some of `plan_marginals`.
BLOCK_ROWS = 128
# Every cloud is padded to a multiple of it, the widest tile.
BLOCK_COLUMNS = 256


class Tile(NamedTuple):
    """Sizes of a tile of scores, and how its program runs."""

    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool
    early_bias: bool = False
    # Whether a block of rows of one part stays in shared memory, in `resident_half_step`.
    resident: bool = False


@lru_cache
def tile_for(depth: int, device: torch.device) -> Tile:
    """The tile for products of `depth` coordinates.

    Two narrow programs on one multiprocessor hide each other's exponentials, which pays while the
    products of a column block are short; a wide one reads less of x. Fetching the bias early costs
    registers that only the narrow tile has.
    """
    if device.type != "cuda":
        return Tile(BLOCK_COLUMNS, 32, 4, 1, descriptors=False)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Tile(128, 32, 8, 3, descriptors=False)
    if depth <= 256 or not _has_room_for_wide_tiles(device):
        return narrow_tile(device)._replace(early_bias=depth > 64)
    # Gluon's products are Hopper's; later cards have others.
    resident = depth <= 512 and torch.cuda.get_device_capability(device)[0] == 9
    stages = 3 if depth <= 640 else 4
    return Tile(256, 64, 8, stages, descriptors=True, resident=resident)


@lru_cache
def narrow_tile(device: torch.device) -> Tile:
    """The tile of kernels that need more registers or more programs, at any depth."""
    if device.type != "cuda":
        return Tile(BLOCK_ROWS, 32, 4, 1, descriptors=False)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Tile(128, 32, 8, 3, descriptors=False)
    return Tile(128, 64, 4, 3 if _has_room_for_wide_tiles(device) else 2, descriptors=True)


@lru_cache
def gathering_tile(device: torch.device) -> Tile:
    """The tile of kernels that gather a class distance for each score, at any depth.

    Gathered numbers need as many registers as the scores.
    """
    return narrow_tile(device)._replace(warps=8)


def pipeline_stages(tile: Tile, gather: bool) -> int | None:
    """Stages that a loop asks for itself; None leaves them to the launch.

    Triton fetches early whatever a loop with stages of its own loads, otherwise only what its
    products read. Gathered class distances fetched early would not fit shared memory.
    """
    return None if gather else tile.stages


def _has_room_for_wide_tiles(device: torch.device) -> bool:
    """Whether four stages of 128 + 256 rows of 64 float16 fit; workstation cards have 100 KB."""
    return shared_memory(device) >= 200_000


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have at the most."""
    # Not in the types of every version of PyTorch.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def operand(coordinates: Tensor, rows: int, tile: Tile) -> object:
    """The source of tiles of `rows` rows for a kernel: a descriptor, or the tensor's pointer."""
    if tile.descriptors:
        return TensorDescriptor.from_tensor(coordinates, [rows, tile.depth])
    return coordinates


class Ranges(NamedTuple):
    """Which block of rows and which column blocks each program works on.

    Attributes:
        programs: (programs, 4) int32: row block, first column block, number of column blocks, and
            slot, how many programs before it have the same rows.
        slots: (row blocks,) int32, programs per block of rows.
        most: the largest of `slots`.
        whole: how many blocks of rows, the first ones, have one program each.
    """

    programs: Tensor
    slots: Tensor
    most: int
    whole: int


# The cost of a program's start and end, in column blocks.
STARTING_COST = 0.5

# Part of a pass that fewer ranges may take longer: the sums of each take memory.
TRIFLE = 0.01


@lru_cache
def column_ranges(row_blocks: int, column_blocks: int, tile: Tile, device: torch.device) -> Ranges:
    """Ranges that keep all multiprocessors busy to the end.

    As many blocks of rows as fill the device some whole times take all columns each, so that all
    programs read the same columns of y at the same time. Those that are left are cut into ranges.
    """
    running = _programs_at_once(tile, device)
    left = row_blocks % running
    counts = range(1, min(column_blocks, 64) + 1)
    costs = [
        row_blocks // running * column_blocks
        + -(-left * count // running) * (-(-column_blocks // count) + STARTING_COST)
        for count in counts
    ]
    most = (1 + TRIFLE) * min(costs)
    splits = next(count for count, cost in zip(counts, costs, strict=True) if cost <= most)
    per_range = -(-column_blocks // splits)
    starts = range(0, column_blocks, per_range)
    whole = row_blocks - left
    programs = [(block, 0, column_blocks, 0) for block in range(whole)]
    programs += [
        (block, first, min(per_range, column_blocks - first), slot)
        for slot, first in enumerate(starts)
        for block in range(whole, row_blocks)
    ]
    slots = [1] * whole + [len(starts)] * left
    return Ranges(
        torch.tensor(programs, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        max(slots),
        whole,
    )


def _programs_at_once(tile: Tile, device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    resident = 2 if tile.warps == 4 else 1
    return resident * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def load_tile(
    source,  # descriptor of, or pointer to, (rows, DIM)
    row,
    k,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Load (ROWS, BLOCK_K) from (row, k); columns past DIM read as 0."""
    if DESCRIPTORS:
        tile = source.load([row, k])
    else:
        o_row = (row + tl.arange(0, ROWS)).to(tl.int64)
        o_k = k + tl.arange(0, BLOCK_K)
        tile = tl.load(
            source + o_row[:, None] * DIM + o_k[None, :], mask=o_k[None, :] < DIM, other=0.0
        )
    return tile


@triton.jit
def load_step(
    x,  # (2 n, DIM) hi parts, then lo parts
    y,  # (2 m, DIM)
    row,
    column,
    step,
    n,
    m,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """The tiles of x and y whose product is one step of a block of scores.

    Steps run over K blocks and, with three parts, over hi hi, hi lo and lo hi.
    """
    K_BLOCKS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    k = (step % K_BLOCKS) * BLOCK_K
    if PARTS == 3:
        part = step // K_BLOCKS
        row += tl.where(part == 2, n, 0)
        column += tl.where(part == 1, m, 0)
    b_x = load_tile(x, row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
    b_y = load_tile(y, column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
    return b_x, b_y
