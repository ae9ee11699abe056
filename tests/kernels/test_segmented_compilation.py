"""The segmented kernels compile for the cards that they are written for, and fit them.

Under the interpreter there is nothing to compile, so the test runs this file as a script, without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from otdd_flash.kernels.tiling import Tile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Compute capability, shared memory, and the tiles that large and small classes get.
CARDS = {
    "A100": (80, 166_912, {128: Tile(128, 32, 8, 3, False), 64: Tile(64, 32, 8, 3, False)}),
    "RTX 4090": (89, 101_376, {128: Tile(128, 32, 8, 3, False), 64: Tile(64, 32, 8, 3, False)}),
    "H200": (90, 232_448, {128: Tile(256, 64, 8, 4, True), 64: Tile(64, 64, 4, 3, True)}),
}


@pytest.mark.parametrize("name", CARDS)
def test_kernels_compile_and_fit(name):
    capability, shared, tiles = CARDS[name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, str(capability), json.dumps(tiles)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for taken in json.loads(done.stdout.splitlines()[-1]):
        assert taken["shared"] <= shared, taken
        assert taken["stack"] == 0, taken


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


def needs(kernel, constants, height: int, tile: Tile, capability: int) -> dict[str, object]:
    from compile_kernels import resources
    from triton.compiler import ASTSource

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
    taken = resources(ASTSource(kernel, signature, values, aligned), capability, tile.warps)
    return {"kernel": kernel.__name__, **taken}


def main() -> None:
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

    capability = int(sys.argv[1])
    taken = []
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
            taken.append(needs(segmented_step_kernel, constants, int(height), tile, capability))
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
            taken.append(needs(kernel, constants, 0, tile, capability))
        for symmetric in (False, True):
            constants = constants_of(memory, 0.5, symmetric, LIMITS, BLOCK_ON_GPU)
            taken.append(needs(segmented_decision_kernel, constants, 0, one_warp, capability))
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
