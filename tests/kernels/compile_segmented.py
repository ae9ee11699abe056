"""Compile the segmented kernels for a card; a script of its own, as `compile_kernels`.

It takes the compute capability and, by the height of a tile, tiles; it prints a JSON object: for
each kernel shared memory and bytes spilled to a stack.
"""

from __future__ import annotations

import json
import sys

from compile_kernels import resources
from triton.compiler import ASTSource

from otdd_flash.engine.quasi_newton_kernels import LIMITS
from otdd_flash.kernels.segments import evaluation, move, softmin
from otdd_flash.kernels.segments import totals as summing
from otdd_flash.kernels.segments.decision import (
    BLOCK_ON_GPU,
    constants_of,
    segmented_decision_kernel,
)
from otdd_flash.kernels.segments.evaluation import NUMBERS
from otdd_flash.kernels.segments.step import (
    CHAIN_PRODUCTS,
    PARTS,
    RANGE_COLUMNS,
    TERMS_IN_FLOAT32,
    segmented_step_kernel,
)
from otdd_flash.kernels.tiling import Tile


def argument_type(kernel: str, name: str, height: int, tile: Tile) -> str:
    if name in ("x", "y"):
        rows = height if name == "x" else tile.columns
        return f"tensordesc<fp16[{rows}, {tile.depth}]>" if tile.descriptors else "*fp16"
    numbers = {"n": "i32", "count": "i32", "row_stride": "i32"}
    if name in numbers:
        return numbers[name]
    kinds = {
        "*i32": ("programs", "blocks"),
        "*i64": ("segments", "row_blocks", "column_blocks"),
        "*i8": ("active",),
        # Vectors of points, and maxima of scores.
        "*fp32": ("candidate", "fresh", "kept", "residual", "remembered", "potential", "highest"),
    }
    stem = name.removesuffix("_ptr").removeprefix("new_")
    # A level of epsilon where decisions are made, and a vector where candidates are.
    kinds["*fp32"] += ("level",) * (kernel == "segmented_move_kernel")
    return next((kind for kind, stems in kinds.items() if stem in stems), "*fp64")


def needs(kernel, constants, height: int, tile: Tile, capability: int) -> dict[str, int]:
    names = kernel.arg_names
    signature = {
        name: "constexpr"
        if name in constants
        else argument_type(kernel.__name__, name, height, tile)
        for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    return resources(ASTSource(kernel, signature, values, aligned), capability, tile.warps)


def main() -> None:
    capability = int(sys.argv[1])
    taken = {}
    for height, values in json.loads(sys.argv[2]).items():
        tile = Tile(*values)
        for parts in (1, PARTS):
            if parts > 1 and tile.columns > int(height):
                # `gathering_tile` of that card.
                tile = tile._replace(columns=int(height), stages=3)
            constants = {
                "LOG2_E": 1.4,
                "DIM": 512,
                "PARTS": parts,
                "BLOCK_M": int(height),
                "BLOCK_N": tile.columns,
                "BLOCK_K": tile.depth,
                "CHAIN": CHAIN_PRODUCTS // tile.depth,
                "EIGHT": TERMS_IN_FLOAT32,
                "RANGE": RANGE_COLUMNS // tile.columns,
                "STAGES": tile.stages,
                "DESCRIPTORS": tile.descriptors,
            }
            name = f"step, {height} rows, {parts} parts"
            taken[name] = needs(segmented_step_kernel, constants, int(height), tile, capability)
    tile, one_warp = tile._replace(warps=4), tile._replace(warps=1)
    # Of many segments, and of a single one.
    for memory, merged in ((4, True), (8, False)):
        width = NUMBERS + 4 * memory
        block = {"BLOCK": softmin.BLOCK}
        given = {"LN_2": 0.7, "MERGED": merged, **block}
        vectors = {"VECTORS": 2 * memory}
        totals = {"WIDTH": width, "LANES": 64, "ROWS": merged, "BLOCK": summing.BLOCK}
        moving = {"MOVE": move.MOVE} | vectors | block
        for kernel, constants in (
            (softmin.segmented_softmin_kernel, given),
            (
                evaluation.segmented_evaluation_kernel,
                {"NUMBERS": NUMBERS} | given | vectors,
            ),
            (summing.segmented_totals_kernel, totals),
            (move.segmented_move_kernel, moving),
        ):
            name = f"{kernel.__name__}{' merged' * merged}"
            taken[name] = needs(kernel, constants, 0, tile, capability)
        for symmetric in (False, True):
            constants = constants_of(memory, 0.5, symmetric, LIMITS, BLOCK_ON_GPU)
            name = f"decision {memory}{' symmetric' * symmetric}"
            taken[name] = needs(segmented_decision_kernel, constants, 0, one_warp, capability)
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
