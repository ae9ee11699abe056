"""Compile kernels for cards that are not here, and say what they take; a script of its own.

Under the interpreter there is nothing to compile, so `test_compilation` runs this without it. It
prints a JSON object per kernel: shared memory in bytes, and bytes of registers spilled to a stack.
A compilation takes seconds: of the ways to look up classes each variant is compiled with one, which
come in turn.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from otdd_flash.kernels.passes import resident_half_step
from otdd_flash.kernels.passes.fused_product import fused_product_kernel
from otdd_flash.kernels.passes.half_step import half_step_kernel
from otdd_flash.kernels.passes.marginal_tiles import MarginalTile
from otdd_flash.kernels.passes.plan_blocks import plan_block_kernel
from otdd_flash.kernels.passes.plan_marginals import GROUP, plan_marginals_kernel
from otdd_flash.kernels.passes.symmetric_step import symmetric_step_kernel
from otdd_flash.kernels.points.digits import base_of, keeps_fractions
from otdd_flash.kernels.tiling import BLOCK_ROWS, Tile, pipeline_stages

# Bytes that ptxas, as Triton 3.8 brings it, keeps in memory over calls in kernels of 56 and of 128
# registers, which may have 255.
KEPT_OVER_CALLS = 16
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
LEFT, RIGHT = ("x", "a", "other_a"), ("y", "b", "other_b")
HALF_POINTERS = (*LEFT, *RIGHT, "out_ptr", "values_ptr")
INTEGER_POINTERS = ("row_classes_ptr", "column_classes_ptr", "marked_ptr", "ranges_ptr")
DOUBLES = {"epsilon_ptr": "*fp64", "product_scale": "fp64"}
# Of `class_terms`; with the first, kernels look up nothing.
CLASSES = ("in_bias", "blocks", "columns", "scores")
FLOATS = ("scale", "costs_scale", "factor_scale", "scale_ratio")


def argument_type(name: str, tile: Tile) -> str:
    if name in (*LEFT, *RIGHT) and tile.descriptors:
        rows = tile.columns if name in RIGHT else BLOCK_ROWS
        return f"tensordesc<fp16[{rows}, {tile.depth}]>"
    if name in DOUBLES:
        return DOUBLES[name]
    if name in HALF_POINTERS:
        return "*fp16"
    if name in INTEGER_POINTERS:
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name in FLOATS else "i32"


def needs(kernel, constants: dict[str, object], tile: Tile, capability: int) -> dict[str, int]:
    names = kernel.arg_names
    types = {name: argument_type(name, tile) for name in names}
    # In place of factors that are not read there is a vector.
    for name in ("a", "b", "other_a", "other_b")[2 * int(str(constants.get("PAIRS", 2))) :]:
        types[name] = "*fp32"
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("n", "m")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    return resources(source, capability, tile.warps, tile.stages)


def marginal_needs(
    dim: int, digits: int, gather: bool, triangle: bool, marginal: MarginalTile, capability: int
) -> dict[str, int]:
    kernel, (rows, tile, registers) = plan_marginals_kernel, marginal
    constants = {
        "DIM": dim,
        "DIGITS": digits,
        "BASE": base_of(dim),
        "BLOCK_M": rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "STAGES": pipeline_stages(tile, gather),
        "GROUP": GROUP,
        "DESCRIPTORS": tile.descriptors,
        "GATHER": gather,
        "TRIANGLE": triangle,
        "FRACTIONS": keeps_fractions(digits, dim),
    }
    names = kernel.arg_names
    types = {"product_scale": "fp64", "labels_x_ptr": "*i32", "labels_y_ptr": "*i32"}
    for name, height in (("x", rows), ("y", tile.columns)):
        box = f"tensordesc<i8[{height}, {tile.depth}]>"
        types[name] = box if tile.descriptors else "*i8"
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*fp64" if name.endswith("_ptr") else "i32")
        for name in names
    }
    free = ("blocks_per_program", "diagonal", "costs_width")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in free)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    return resources(source, capability, tile.warps, tile.stages, registers)


def resident_needs(dim: int, shifted: bool, classes: str, tile: Tile) -> dict[str, int]:
    kernel = resident_half_step.resident_half_step_kernel
    half = resident_half_step.HALF_ROWS.value
    boxes = {
        name: f"tensordesc<fp16[{rows},{tile.depth}],"
        f"{gl.NVMMASharedLayout.get_default_for([rows, tile.depth], gl.float16)!r}>"
        for name, rows in (("x", half), ("y", tile.columns))
    }
    constants = {
        "K_BLOCKS": -(-dim // tile.depth),
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "STAGES": tile.stages,
        "SHIFTED": shifted,
        "CLASSES": classes,
    }
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else boxes.get(name) or argument_type(name, tile)
        for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    return resources(GluonASTSource(kernel, signature, values), 90, 4, tile.stages)


def resources(
    source: ASTSource, capability: int, warps: int, stages: int = 3, registers: int | None = None
) -> dict[str, int]:
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        stack = re.search(r"STACK:(\d+)", dumped(file.name, "--dump-resource-usage"))
        assert stack is not None
        taken = int(stack[1])
        # Some assemblers keep a number or two in memory while a division of float64 is called.
        if 0 < taken <= KEPT_OVER_CALLS and re.search(r"\bCALL\b", dumped(file.name, "-sass")):
            taken = 0
    return {"shared": compiled.metadata.shared, "stack": taken}


def dumped(cubin: str, what: str) -> str:
    command = [CUOBJDUMP, what, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def weighted_by(pairs: int, *, numbers: bool) -> dict[str, object]:
    return {"RANK": 64 * (pairs > 0), "PAIRS": pairs, "NUMBERS": numbers, "GROUP": 8}


def main() -> None:
    capability, dim, parts = (int(argument) for argument in sys.argv[1:4])
    given = json.loads(sys.argv[4])
    if "plan_marginals" in given:
        rows, tile, registers = given["plan_marginals"]
        marginal = MarginalTile(rows, Tile(*tile), registers)
        taken = {
            f"plan_marginals{' gathering' if gather else ''}": marginal_needs(
                dim, parts, gather, not gather, marginal, capability
            )
            for gather in (False, True)
        }
        sys.stdout.write(json.dumps(taken) + "\n")
        return
    tiles = {name: Tile(*values) for name, values in given.items()}
    variants = {
        "half_step": (
            half_step_kernel,
            [{"SHIFTED": shifted, "REPAIR": not shifted} for shifted in (False, True)],
        ),
        "plan_block": (plan_block_kernel, [weighted_by(0, numbers=False)]),
        "plan_block_with_factors": (
            plan_block_kernel,
            [
                weighted_by(1, numbers=False),
                *(weighted_by(2, numbers=each) for each in (False, True)),
            ],
        ),
        "symmetric_step": (symmetric_step_kernel, [{}]),
    }
    for name in tiles:
        if name.startswith("fused_product") and not name.endswith("_gathering"):
            columns, extra = map(int, name.split()[1:])
            choice = {"COLUMNS": columns, "EXTRA": extra, "HELD": tiles[name].depth >= dim}
            variants[name] = fused_product_kernel, [choice]
    taken, turn = {}, cycle(CLASSES)
    for name, (kernel, choices) in variants.items():
        for choice in choices * (1 + (name == "half_step")):
            classes = next(turn)
            if classes == "in_bias" and name != "half_step":
                classes = next(turn)
            gather = classes == "scores"
            tile = tiles[f"{name}_gathering" if gather else name]
            constants = {
                "DIM": dim,
                "PARTS": parts,
                "LOW": parts == 3,
                "BLOCK_M": BLOCK_ROWS,
                "BLOCK_N": tile.columns,
                "BLOCK_K": tile.depth,
                "STAGES": pipeline_stages(tile, gather and kernel is not plan_block_kernel),
                "EARLY_BIAS": tile.early_bias,
                "DESCRIPTORS": tile.descriptors,
                "CLASSES": classes,
            }
            known = {key: value for key, value in constants.items() if key in kernel.arg_names}
            label = f"{name} {choice} {classes}"
            taken[label] = needs(kernel, known | choice, tile, capability)
    if tiles["half_step"].resident and parts == 1:
        for shifted, classes in zip((False, True), ("in_bias", "columns"), strict=True):
            name = f"half_step resident {shifted} {classes}"
            taken[name] = resident_needs(dim, shifted, classes, tiles["half_step"])
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
