"""Row-wise log-sum-exp of labelled scores: a Sinkhorn half-step but for its last additions.

    out_i = log2 sum_j 2^(scale x_i . y_j + bias[class of i, j])

Shapes: x (n, d) and y (m, d) in float16, rows in class-pure blocks (`PackedPoints`), bias (V, m) in
float32, out (n,) in float32. The n x m scores are never stored.

Rows of one block have one class, so a label term depends on the column only: potential, mass, norm
and class distance of column j are one number, bias[c, j], and labels cost nothing. Where classes
are so small that padding them to blocks would cost more, rows stay mixed, bias has one row, and the
class term is gathered per score from a `ClassTerm`.

Coordinates carry the 11 significant bits that TF32 would keep, at twice its rate; with PARTS = 3
each is a sum hi + lo of two float16 and hi hi + hi lo + lo hi is accumulated, about 22 bits.

One program owns a block of rows and a range of columns. Its loop runs over (column block, part, K
block) as one flat sequence, so that loads are in flight across column blocks, and keeps a running
maximum and sum per row (Ye et al. 2026, arXiv:2602.03067, Algorithm 1). Ranges are cut so that
programs fill the multiprocessors evenly; a second kernel merges their partial results.

Work: 2 n m d PARTS operations on tensor cores and n m exponentials. Memory traffic: y once per row
block, through the second-level cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows per class-pure block, and the multiple that columns are padded to.
BLOCK_ROWS = 128
BLOCK_COLUMNS = 256


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
def row_log_sum_exp_kernel(
    x,  # (PARTS > 1 ? 2 n : n, DIM) float16: hi parts, then lo parts
    y,  # (PARTS > 1 ? 2 m : m, DIM) float16
    bias_ptr,  # (V, m) float32
    block_class_ptr,  # (n / BLOCK_M,) int32
    table_ptr,  # (V_x, V_y) float32, read if GATHER
    labels_x_ptr,  # (n,) int32, read if GATHER
    labels_y_ptr,  # (m,) int32, read if GATHER
    highest_ptr,  # (splits, n) float32
    sums_ptr,  # (splits, n) float32
    n,
    m,
    scale,
    table_width,
    blocks_per_split,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_BIAS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """One program per (block of BLOCK_M rows, range of column blocks)."""
    i_block, i_split = tl.program_id(0), tl.program_id(1)
    bias_ptr += tl.load(block_class_ptr + i_block).to(tl.int64) * m
    first = i_split * blocks_per_split
    blocks = tl.minimum(blocks_per_split, m // BLOCK_N - first)
    if GATHER:
        labels_x = tl.load(labels_x_ptr + i_block * BLOCK_M + tl.arange(0, BLOCK_M))
        p_table = table_ptr + labels_x.to(tl.int64) * table_width  # (BLOCK_M,)

    K_BLOCKS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = K_BLOCKS * PARTS
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in tl.range(0, blocks * STEPS, num_stages=STAGES):
        column = (first + t // STEPS) * BLOCK_N
        step = t % STEPS
        k = (step % K_BLOCKS) * BLOCK_K
        row_x = i_block * BLOCK_M
        row_y = column
        if PARTS == 3:
            part = step // K_BLOCKS  # 0: hi hi, 1: hi lo, 2: lo hi
            row_x += tl.where(part == 2, n, 0)
            row_y += tl.where(part == 1, m, 0)
        b_x = load_tile(x, row_x, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)  # (BLOCK_M, BLOCK_K)
        b_y = load_tile(y, row_y, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)  # (BLOCK_N, BLOCK_K)
        if EARLY_BIAS:
            # Loaded in every step, so that it is in flight like the coordinates.
            b_bias = tl.load(bias_ptr + column + tl.arange(0, BLOCK_N))
        scores = tl.dot(b_x, b_y.T, scores)  # (BLOCK_M, BLOCK_N)
        if step == STEPS - 1:
            if not EARLY_BIAS:
                b_bias = tl.load(bias_ptr + column + tl.arange(0, BLOCK_N))
            logits = scores * scale + b_bias[None, :]
            if GATHER:
                labels_y = tl.load(labels_y_ptr + column + tl.arange(0, BLOCK_N))
                logits += tl.load(p_table[:, None] + labels_y[None, :])
            raised = tl.maximum(highest, tl.max(logits, 1))
            sums = sums * tl.exp2(highest - raised) + tl.sum(tl.exp2(logits - raised[:, None]), 1)
            highest = raised
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    o_row = i_split.to(tl.int64) * n + i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(highest_ptr + o_row, highest)
    tl.store(sums_ptr + o_row, sums)


@triton.jit
def merge_kernel(
    highest_ptr,  # (splits, n) float32
    sums_ptr,  # (splits, n) float32
    out_ptr,  # (n,) float32
    n,
    splits,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK rows: log2 of the sum over all splits."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < n
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for i_split in range(splits):
        o_partial = i_split * n + o_row
        partial = tl.load(highest_ptr + o_partial, mask=m_row, other=0.0)
        raised = tl.maximum(highest, partial)
        added = tl.load(sums_ptr + o_partial, mask=m_row, other=1.0)
        sums = sums * tl.exp2(highest - raised) + added * tl.exp2(partial - raised)
        highest = raised
    tl.store(out_ptr + o_row, highest + tl.log2(sums), mask=m_row)


class Tile(NamedTuple):
    """Sizes of the main kernel's tile."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    early_bias: bool = False


class ClassTerm(NamedTuple):
    """What is added to the score of each pair of labels, for rows of mixed classes.

    Attributes:
        table: (V_x, V_y) float32, in base-2 logarithms.
        labels_x: (n,) int32, rows of `table`.
        labels_y: (m,) int32, columns of `table`.
    """

    table: Tensor
    labels_x: Tensor
    labels_y: Tensor


def row_log_sum_exp(
    x: Tensor,
    y: Tensor,
    bias: Tensor,
    block_class: Tensor,
    scale: float,
    *,
    parts: int = 1,
    class_term: ClassTerm | None = None,
) -> Tensor:
    """Log2 of the sum over columns of 2^(scale x_i . y_j + bias[class of i, j]).

    Args:
        x: (n, d) float16, or (2 n, d) with the lo parts after the hi parts if `parts` is 3; n is a
            multiple of BLOCK_ROWS and d of 8.
        y: (m, d) or (2 m, d) likewise; m is a multiple of BLOCK_COLUMNS.
        bias: (V, m) float32, in base-2 logarithms; very negative for columns that do not count.
        block_class: (n / BLOCK_ROWS,) int32, the row of `bias` for each block of rows.
        scale: factor of the products, positive.
        parts: 1 product of hi parts, or 3 products of hi and lo parts.
        class_term: added to the scores, where the rows of a block have several classes.

    Returns:
        (n,) float32.
    """
    n, m, dim = block_class.shape[0] * BLOCK_ROWS, bias.shape[1], x.shape[1]
    tile, descriptors = _tile(dim * parts, x.device)
    row_blocks, column_blocks = n // tile.rows, m // tile.columns
    per_split = _blocks_per_split(row_blocks, column_blocks, tile, x.device)
    splits = triton.cdiv(column_blocks, per_split)
    highest = torch.empty((splits, n), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(highest)
    operands: tuple[object, object] = (x, y)
    if descriptors:
        operands = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(y, [tile.columns, tile.depth]),
        )
    row_log_sum_exp_kernel[(row_blocks, splits)](
        *operands,
        bias,
        block_class,
        *(class_term or (bias, block_class, block_class)),
        highest,
        sums,
        n,
        m,
        scale,
        class_term.table.shape[1] if class_term else 0,
        per_split,
        DIM=dim,
        PARTS=parts,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        STAGES=tile.stages,
        EARLY_BIAS=tile.early_bias,
        DESCRIPTORS=descriptors,
        GATHER=class_term is not None,
        num_warps=tile.warps,
    )
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    merge_kernel[(triton.cdiv(n, 256),)](highest, sums, out, n, splits, BLOCK=256)
    return out


def _tile(depth: int, device: torch.device) -> tuple[Tile, bool]:
    """The tile that was fastest on an H200, and whether the device has tensor descriptors.

    Two narrow programs on one multiprocessor hide each other's exponentials; a wide one reads less
    of x, which pays when the products of a column block take long. Fetching the bias early costs
    registers that only the narrow tile has.
    """
    if device.type != "cuda":
        return Tile(BLOCK_ROWS, BLOCK_COLUMNS, 32, 4, 1), False
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Tile(BLOCK_ROWS, 128, 32, 8, 3), False
    if depth <= 640:
        return Tile(BLOCK_ROWS, 128, 64, 4, 3, early_bias=depth > 64), True
    return Tile(BLOCK_ROWS, 256, 64, 8, 3), True


def _blocks_per_split(row_blocks: int, column_blocks: int, tile: Tile, device: torch.device) -> int:
    """Column blocks per program, so that the last wave of programs is nearly full.

    The least number of ranges wins whose waves waste under 3%, or else the one that wastes least.
    """
    if device.type != "cuda":
        return max(1, column_blocks // 2)
    resident = 2 if tile.warps == 4 else 1
    slots = resident * torch.cuda.get_device_properties(device).multi_processor_count
    best, least = column_blocks, float("inf")
    for splits in range(1, min(column_blocks, 64) + 1):
        per_split = triton.cdiv(column_blocks, splits)
        programs = row_blocks * triton.cdiv(column_blocks, per_split)
        # Time in units of column blocks; a program costs about one more for its start and end.
        waste = triton.cdiv(programs, slots) * slots * (per_split + 1)
        waste /= row_blocks * column_blocks
        if waste < 0.97 * least:
            best, least = per_split, waste
    return best
