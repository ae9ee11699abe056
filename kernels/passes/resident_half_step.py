"""The half-step with a block of rows resident in shared memory, for Hopper and 256 < d <= 512.

The same sums as `half_step_kernel` of class-pure blocks and one product per score:

    sums_i = sum_j 2^(scale x_i . y_j + bias_j - w[k_i, l_j] - highest_i)

Shapes: x (n, d), y (m, d) float16 and bias (m,), sums and highest (slots, n) float32. In plain
Triton a tile of x is copied to shared memory again for every block of columns; at this d copying
it once saves a third of that traffic, which is energy, and a Hopper card at its power limit turns
energy into time. Plain Triton cannot keep a tile there, its dialect Gluon can.

One program has nine warps. One loads: the rows once, then blocks of y through a ring of stages. Two
groups of four multiply and sum 64 rows each, at their own pace, so that one's exponentials run
beside the other's products. A stage is free again once both have used it. `half_step` calls
`resident_half_step` for a tile that is `resident` (`tiling.tile_for`), but not for blocks that it
does again, and merges the sums. A change of the sums must be made in both
(`tests/kernels/test_half_step.py`).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from otdd_flash.kernels.launch import LOG2_E, on_its_device
from otdd_flash.kernels.passes.score_terms import ClassTerms
from otdd_flash.kernels.tiling import BLOCK_ROWS, Tile

# Triton renamed it.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# Rows of one group of four warps, the fewest that a Hopper product takes.
HALF_ROWS = gl.constexpr(64)
# Registers of a thread of a group; measured, with enough left for the loading warp.
REGISTERS = gl.constexpr(200)
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity that its barrier completes with."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage before this one."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def load(
    x, y, rows, stages, rows_ready, ready, free, row, first, blocks,
    K_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the block of rows, then every (BLOCK_N, BLOCK_K) tile of y in turn."""
    mbarrier.expect(rows_ready, 2 * K_BLOCKS * HALF_ROWS * BLOCK_K * 2)
    for i in gl.static_range(2 * K_BLOCKS):
        i_row = row + i // K_BLOCKS * HALF_ROWS
        async_load(x, [i_row, i % K_BLOCKS * BLOCK_K], rows_ready, rows.index(i))
    stage = 0
    # A barrier that nothing has completed yet passes for the parity before its first.
    phase = 1
    for block in range(first, first + blocks):
        for k in range(K_BLOCKS):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(ready.index(stage), BLOCK_N * BLOCK_K * 2)
            async_load(y, [block * BLOCK_N, k * BLOCK_K], ready.index(stage), stages.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_and_sum(
    HALF: gl.constexpr,
    rows,  # (2 K_BLOCKS, HALF_ROWS, BLOCK_K) float16, in shared memory
    stages,  # (STAGES, BLOCK_N, BLOCK_K) float16, in shared memory
    rows_ready,
    ready,
    free,
    bias_ptr,
    costs_ptr,
    column_classes_ptr,
    shift_ptr,
    highest_ptr,
    sums_ptr,
    row,
    out_row,
    first,
    blocks,
    scale,
    costs_scale,
    K_BLOCKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SHIFTED: gl.constexpr,
    CLASSES: gl.constexpr,
):
    """Sum one half of the rows over all columns of the range."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_row = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, PRODUCT))
    o_column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, PRODUCT))
    ROWS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    sums = gl.zeros([HALF_ROWS], gl.float32, layout=ROWS)
    if SHIFTED:
        highest = gl.load(shift_ptr + row + o_row)
    else:
        highest = gl.full([HALF_ROWS], -float("inf"), gl.float32, layout=ROWS)  # (HALF_ROWS,)
    mbarrier.wait(rows_ready, 0)
    stage = 0
    phase = 0
    for block in range(first, first + blocks):
        scores = warpgroup_mma_init(gl.zeros([HALF_ROWS, BLOCK_N], gl.float32, layout=PRODUCT))
        for k in range(K_BLOCKS):
            mbarrier.wait(ready.index(stage), phase)
            b_y = stages.index(stage).permute((1, 0))
            scores = warpgroup_mma(
                rows.index(HALF * K_BLOCKS + k), b_y, scores, use_acc=k > 0, is_async=True
            )
            # The product before this one has ended, and its stage is done with.
            scores = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[scores]))
            mbarrier.arrive(free.index(stage_before(stage, STAGES)), pred=k > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        b_bias = gl.load(bias_ptr + block * BLOCK_N + o_column)
        if CLASSES == "blocks":
            left = gl.load(costs_ptr + gl.load(column_classes_ptr + 2 * block))
            right = gl.load(costs_ptr + gl.load(column_classes_ptr + 2 * block + 1))
            b_bias -= gl.where(o_column < BLOCK_N // 2, left, right) * costs_scale
        if CLASSES == "columns":
            classes = gl.load(column_classes_ptr + block * BLOCK_N + o_column)
            b_bias -= gl.load(costs_ptr + classes) * costs_scale
        logits = warpgroup_mma_wait(0, deps=[scores]) * scale + b_bias[None, :]
        mbarrier.arrive(free.index(stage_before(stage, STAGES)))
        if SHIFTED:
            sums += gl.sum(gl.exp2(logits - highest[:, None]), 1)
        else:
            raised = gl.maximum(highest, gl.max(logits, 1))
            sums = sums * gl.exp2(highest - raised)
            sums += gl.sum(gl.exp2(logits - raised[:, None]), 1)
            highest = raised
    gl.store(highest_ptr + out_row + o_row, highest)
    gl.store(sums_ptr + out_row + o_row, sums)


@on_its_device
@gluon.jit
def resident_half_step_kernel(
    x,  # descriptor of (2 n, d) float16, tiles of (HALF_ROWS, BLOCK_K)
    y,  # descriptor of (2 m, d) float16, tiles of (BLOCK_N, BLOCK_K)
    bias_ptr,  # (m,) float32
    costs_ptr,  # (V_x, costs_width) float32
    row_classes_ptr,  # (n / BLOCK_ROWS,) int32
    column_classes_ptr,  # int32, of `score_terms.add_bias`
    shift_ptr,  # (n,) float32, read if SHIFTED
    ranges_ptr,  # (programs, 4) int32: row block, first column block, column blocks, slot
    highest_ptr,  # (slots, n) float32
    sums_ptr,  # (slots, n) float32
    epsilon_ptr,  # () float64
    n,
    product_scale: tl.float64,  # in units of the cost
    costs_width,
    K_BLOCKS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SHIFTED: gl.constexpr,
    CLASSES: gl.constexpr,
):
    """One program per range of column blocks of one block of 2 HALF_ROWS rows."""
    p_range = ranges_ptr + 4 * gl.program_id(0)
    i_block = gl.load(p_range)
    first = gl.load(p_range + 1)
    blocks = gl.load(p_range + 2)
    costs_ptr += gl.load(row_classes_ptr + i_block).to(gl.int64) * costs_width
    row = i_block * 2 * HALF_ROWS
    out_row = gl.load(p_range + 3).to(gl.int64) * n + row
    per_cost = LOG2_E / gl.load(epsilon_ptr)
    scale, costs_scale = (product_scale * per_cost).to(gl.float32), per_cost.to(gl.float32)

    rows = gl.allocate_shared_memory(gl.float16, [2 * K_BLOCKS, HALF_ROWS, BLOCK_K], x.layout)
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, BLOCK_K], y.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    rows_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(rows_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_and_sum, (
                0, rows, stages, rows_ready, ready, free, bias_ptr, costs_ptr, column_classes_ptr,
                shift_ptr, highest_ptr, sums_ptr, row, out_row, first, blocks, scale, costs_scale,
                K_BLOCKS, BLOCK_N, STAGES, SHIFTED, CLASSES,
            )),
            (multiply_and_sum, (
                1, rows, stages, rows_ready, ready, free, bias_ptr, costs_ptr, column_classes_ptr,
                shift_ptr, highest_ptr, sums_ptr, row, out_row, first, blocks, scale, costs_scale,
                K_BLOCKS, BLOCK_N, STAGES, SHIFTED, CLASSES,
            )),
            (load, (
                x, y, rows, stages, rows_ready, ready, free, row, first, blocks,
                K_BLOCKS, BLOCK_N, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def resident_half_step(
    x: Tensor,
    y: Tensor,
    bias: Tensor,
    terms: ClassTerms,
    shift: Tensor | None,
    ranges: Tensor,
    highest: Tensor,
    sums: Tensor,
    epsilon: Tensor,
    product_scale: float,
    tile: Tile,
) -> None:
    """Overwrite `highest` and `sums` (slots, n) with those of each range of columns.

    Args:
        x: (2 n, d) float16 packed coordinates in class-pure blocks.
        y: (2 m, d) float16 packed coordinates.
        bias: (m,) float32, of the columns.
        terms: class distances, not of `scores`.
        shift: (n,) float32 near the highest logits, or None for a running maximum.
        ranges: (programs, 4) int32, as `column_ranges` makes them.
        highest: (slots, n) float32.
        sums: (slots, n) float32.
        epsilon: () float64, in units of the cost.
        product_scale: of a product of packed coordinates, in units of the cost.
        tile: one that is `resident`.
    """
    assert 2 * HALF_ROWS.value == BLOCK_ROWS
    assert tile.columns == 2 * BLOCK_ROWS
    boxes = [HALF_ROWS.value, tile.depth], [tile.columns, tile.depth]
    x_tiles, y_tiles = (
        TensorDescriptor.from_tensor(
            points, box, gl.NVMMASharedLayout.get_default_for(box, gl.float16)
        )
        for points, box in zip((x, y), boxes, strict=True)
    )
    resident_half_step_kernel[(len(ranges),)](
        x_tiles,
        y_tiles,
        bias,
        terms.costs,
        terms.rows,
        terms.columns,
        bias if shift is None else shift,
        ranges,
        highest,
        sums,
        epsilon,
        highest.shape[1],
        product_scale,
        terms.costs.shape[1],
        K_BLOCKS=-(-x.shape[1] // tile.depth),
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        STAGES=tile.stages,
        SHIFTED=shift is not None,
        CLASSES=terms.kind,
        num_warps=4,
    )
