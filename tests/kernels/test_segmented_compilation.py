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
        assert taken["shared"] <= shared
        assert taken["stack"] == 0


def argument_type(name: str, height: int, tile: Tile) -> str:
    if name in ("x", "y"):
        rows = height if name == "x" else tile.columns
        return f"tensordesc<fp16[{rows}, {tile.depth}]>" if tile.descriptors else "*fp16"
    types = {
        "programs_ptr": "*i32",
        "segments_ptr": "*i64",
        "active_ptr": "*i8",
        "done_ptr": "*i8",
        "n": "i32",
        "count": "i32",
        "row_stride": "i32",
    }
    doubles = ("epsilon", "factors", "masses", "seen", "move", "rows", "columns", "costs")
    doubles += (
        "log2_masses",
        "sums",
        "settings",
        "level",
        "state",
        "terms",
        "new_level",
        "new_state",
    )
    types |= {f"{double}_ptr": "*fp64" for double in doubles}
    return types.get(name, "*fp32")


def needs(kernel, constants, height: int, tile: Tile, capability: int) -> dict[str, int]:
    from compile_kernels import resources
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else argument_type(name, height, tile)
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
    from otdd_flash.solver.segmented_kernels import LIMITS

    from otdd_flash.engine.segments import MEMORY
    from otdd_flash.kernels import segmented_look, segmented_move, segmented_softmin
    from otdd_flash.kernels.segmented_decision import constants_of, segmented_decision_kernel
    from otdd_flash.kernels.segmented_step import (
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
    vectors = {"VECTORS": 2 * MEMORY}
    for kernel, constants in (
        (
            segmented_softmin.segmented_softmin_kernel,
            {"LN_2": 0.7, "BLOCK": segmented_softmin.BLOCK},
        ),
        (
            segmented_look.segmented_look_kernel,
            {"LN_2": 0.7, "NUMBERS": 14, "BLOCK": segmented_look.BLOCK} | vectors,
        ),
        (segmented_move.segmented_move_kernel, {"BLOCK": segmented_move.BLOCK} | vectors),
    ):
        taken.append(needs(kernel, constants, 0, tile._replace(warps=4), capability))
    for symmetric in (False, True):
        constants = constants_of(MEMORY, 0.5, symmetric, LIMITS)
        one_warp = tile._replace(warps=1)
        taken.append(needs(segmented_decision_kernel, constants, 0, one_warp, capability))
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
