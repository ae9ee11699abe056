"""Compile kernels whose tiles a card decides; a script of its own.

Under the interpreter there is nothing to compile, so `test_compilation` runs this without it, with
the compute capability of a card and its tiles. It prints what each kernel of each group takes. A
compilation takes seconds: of the ways to look up classes each variant is compiled with one, which
come in turn.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from typing import Any

from compiling import needs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from otdd_flash.kernels import stored as stored_kernels
from otdd_flash.kernels.passes import resident_half_step
from otdd_flash.kernels.passes.fused_product import fused_product_kernel
from otdd_flash.kernels.passes.half_step import half_step_kernel
from otdd_flash.kernels.passes.plan_blocks import plan_block_kernel
from otdd_flash.kernels.passes.plan_marginals import GROUP, plan_marginals_kernel
from otdd_flash.kernels.passes.symmetric_step import symmetric_step_kernel
from otdd_flash.kernels.points.digits import base_of, keeps_fractions
from otdd_flash.kernels.segments import decision, evaluation, step
from otdd_flash.kernels.tiling import BLOCK_ROWS, Tile, pipeline_stages
from otdd_flash.operators.torch_operator import LEAST_EXPONENT

Taken = dict[str, dict[str, int]]
LEFT, RIGHT = ("x", "a", "other_a"), ("y", "b", "other_b")
# Of passes.
PASS_TYPES = {"epsilon_ptr": "*fp64", "product_scale": "fp64"}
PASS_TYPES |= dict.fromkeys((*LEFT, *RIGHT, "out_ptr", "values_ptr"), "*fp16")
PASS_TYPES |= dict.fromkeys(
    ("row_classes_ptr", "column_classes_ptr", "marked_ptr", "ranges_ptr"), "*i32"
)
PASS_TYPES |= dict.fromkeys(("scale", "costs_scale", "factor_scale", "scale_ratio"), "fp32")
# Of segments, by the stem of a name.
SEGMENT_TYPES = {
    "i32": ("n", "count", "row_stride"),
    "*i32": ("programs", "blocks"),
    "*i64": ("segments", "row_blocks", "column_blocks"),
    "*i8": ("active",),
    "*fp32": ("candidate", "fresh", "kept", "residual", "remembered", "potential", "highest"),
}
# Of stored scores.
STORED_TYPES = {
    "i32": (
        *("problem_stride", "stride", "masses_stride", "rows", "columns", "points", "classes"),
        *("first", "n"),
    ),
    "*fp32": (
        *("scores_ptr", "transposed_ptr", "potential_ptr", "highest_ptr", "cross_ptr"),
        "own_ptr",
    ),
    "*i64": ("row_labels_ptr", "column_labels_ptr", "segments_ptr"),
    "*i32": ("programs_ptr",),
    "*i8": ("active_ptr",),
}


def found(types: dict[str, tuple[str, ...]], name: str) -> str:
    return next((kind for kind, names in types.items() if name in names), "*fp64")


def a_pass(kernel: Any, constants: dict[str, Any], tile: Tile, capability: int) -> dict[str, int]:
    # In place of factors that are not read there is a vector.
    unread = ("a", "b", "other_a", "other_b")[2 * constants.get("PAIRS", 2) :]

    def type_of(name: str) -> str:
        if name in unread:
            return "*fp32"
        if name in (*LEFT, *RIGHT) and tile.descriptors:
            rows = tile.columns if name in RIGHT else BLOCK_ROWS
            return f"tensordesc<fp16[{rows}, {tile.depth}]>"
        return PASS_TYPES.get(name, "*fp32" if name.endswith("_ptr") else "i32")

    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return needs(kernel, type_of, constants, capability, multiples=("n", "m"), **options)


def resident(dim: int, shifted: bool, classes: str, tile: Tile) -> dict[str, int]:
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
    types = PASS_TYPES | boxes
    return needs(
        resident_half_step.resident_half_step_kernel,
        lambda name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32"),
        *(constants, 90),
        source=GluonASTSource,
        num_warps=4,
        num_stages=tile.stages,
    )


def passes(capability: int, dim: int, parts: int, given: dict[str, Any]) -> Taken:
    tiles = {name: Tile(*values) for name, values in given.items()}
    weighted = {"RANK": 64, "NUMBERS": False, "GROUP": 8}
    variants: dict[str, tuple[Any, list[dict[str, Any]]]] = {
        "half_step": (half_step_kernel, [{"SHIFTED": s, "REPAIR": not s} for s in (False, True)]),
        "plan_block": (plan_block_kernel, [weighted | {"RANK": 0, "PAIRS": 0}]),
        "plan_block_with_factors": (
            plan_block_kernel,
            [weighted | {"PAIRS": 2, "NUMBERS": True}],
        ),
        "symmetric_step": (symmetric_step_kernel, [{}]),
    }
    for name in tiles:
        if name.startswith("fused_product") and not name.endswith("_gathering"):
            columns, extra = map(int, name.split()[1:])
            choice = {"COLUMNS": columns, "EXTRA": extra, "HELD": tiles[name].depth >= dim}
            variants[name] = fused_product_kernel, [choice]
    # Of `class_terms`; with the first, kernels look up nothing.
    taken, turn = {}, cycle(("in_bias", "blocks", "columns", "scores"))
    for name, (kernel, choices) in variants.items():
        for choice in choices:
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
            taken[label] = a_pass(kernel, known | choice, tile, capability)
    if tiles["half_step"].resident and parts == 1:
        for shifted, classes in ((False, "in_bias"), (True, "columns")):
            name = f"half_step resident {shifted} {classes}"
            taken[name] = resident(dim, shifted, classes, tiles["half_step"])
    return taken


def sums(capability: int, dim: int, digits: int, gather: bool, given: list[Any]) -> Taken:
    rows, tile, registers = given[0], Tile(*given[1]), given[2]
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
        "TRIANGLE": not gather,
        "FRACTIONS": keeps_fractions(digits, dim),
    }
    types = {"product_scale": "fp64", "labels_x_ptr": "*i32", "labels_y_ptr": "*i32"}
    for name, height in (("x", rows), ("y", tile.columns)):
        box = f"tensordesc<i8[{height}, {tile.depth}]>"
        types[name] = box if tile.descriptors else "*i8"
    names = {*plan_marginals_kernel.arg_names} - {"blocks_per_program", "diagonal", "costs_width"}
    taken = needs(
        plan_marginals_kernel,
        lambda name: types.get(name, "*fp64" if name.endswith("_ptr") else "i32"),
        *(constants, capability),
        multiples=names,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=registers,
    )
    return {"plan_marginals": taken}


def segments(capability: int, given: dict[str, Any], *, steps_alone: bool) -> Taken:
    def compiled(kernel: Any, constants: dict[str, Any], height: int, tile: Tile) -> dict[str, int]:
        def type_of(name: str) -> str:
            if name in ("x", "y"):
                rows = height if name == "x" else tile.columns
                return f"tensordesc<fp16[{rows}, {tile.depth}]>" if tile.descriptors else "*fp16"
            stem = name.removesuffix("_ptr").removeprefix("new_")
            # A level of epsilon where decisions are made, and a vector where candidates are.
            if stem == "level" and kernel is decision.segmented_move_kernel:
                return "*fp32"
            return found(SEGMENT_TYPES, name if name in SEGMENT_TYPES["i32"] else stem)

        return needs(kernel, type_of, constants, capability, num_warps=tile.warps)

    taken = {}
    for height, values in given.items():
        tile = Tile(*values)
        for parts in (step.PARTS,) if steps_alone else (1, step.PARTS):
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
                "CHAIN": step.CHAIN_PRODUCTS // tile.depth,
                "EIGHT": step.TERMS_IN_FLOAT32,
                "RANGE": step.RANGE_COLUMNS // tile.columns,
                "STAGES": tile.stages,
                "DESCRIPTORS": tile.descriptors,
            }
            name = f"step, {height} rows, {parts} parts"
            taken[name] = compiled(step.segmented_step_kernel, constants, int(height), tile)
    if steps_alone:
        return taken
    tile = tile._replace(warps=4)
    # Of many segments, and of a single one, with exact and with relaxed marginals.
    for memory, merged, relaxed in ((4, True, False), (8, False, False), (8, True, True)):
        block, vectors = {"BLOCK": evaluation.BLOCK}, {"VECTORS": 2 * memory}
        of_sums = {"LN_2": 0.7, "MERGED": merged, "RELAXED": relaxed, **block}
        numbers = evaluation.RELAXED_NUMBERS if relaxed else evaluation.NUMBERS
        width, lanes = numbers + 4 * memory, {"LANES": 64, "BLOCK": evaluation.BLOCKS_AT_ONCE}
        of_rows = (3 if relaxed else 2) * merged
        moved = decision.RELAXED_MOVE if relaxed else decision.MOVE
        for kernel, constants in (
            (evaluation.segmented_softmin_kernel, {"SUMS": max(2, of_rows)} | of_sums),
            (evaluation.segmented_evaluation_kernel, {"NUMBERS": numbers} | of_sums | vectors),
            (
                evaluation.segmented_totals_kernel,
                {"WIDTH": width, "ROWS": of_rows, "ROW_LANES": 4 if relaxed else 2} | lanes,
            ),
            (
                decision.segmented_move_kernel,
                {"MOVE": moved, "RELAXED": relaxed} | vectors | block,
            ),
        ):
            name = f"{kernel.__name__}{' merged' * merged}{' relaxed' * relaxed}"
            taken[name] = compiled(kernel, constants, 0, tile)
        # Of self terms and of others.
        for own in (True, False) if relaxed else (merged,):
            given = memory, 0.5, own, decision.BLOCK_ON_GPU
            constants = decision.constants_of(*given, relaxed=relaxed)
            kernel, one_warp = decision.segmented_decision_kernel, tile._replace(warps=1)
            name = f"decision {memory}{' relaxed' * relaxed}{' own' * own}"
            taken[name] = compiled(kernel, constants, 0, one_warp)
    return taken


def stored(capability: int) -> Taken:
    tile = {"BLOCK_M": stored_kernels.BLOCK_ROWS, "BLOCK_N": stored_kernels.BLOCK_COLUMNS}
    rows, columns = stored_kernels.ROWS_OF_PROGRAM, stored_kernels.COLUMNS_AT_ONCE
    taken = {}
    for kernel, constants in (
        (stored_kernels.stored_scores_kernel, {"SYMMETRIC": True, "BLOCK": stored_kernels.BLOCK}),
        (stored_kernels.stored_step_kernel, {"LOG2_E": 1.4, "BLOCK_M": rows, "BLOCK_N": columns}),
        (stored_kernels.stored_plan_kernel, {"LEAST": LEAST_EXPONENT} | tile),
        (stored_kernels.stored_product_kernel, tile),
        (stored_kernels.signed_plan_kernel, {"OWN": True} | tile),
    ):
        # What is written of plans with their signs is float32.
        single = ("out_ptr",) if kernel is stored_kernels.signed_plan_kernel else ()
        types = STORED_TYPES | {"*fp32": (*STORED_TYPES["*fp32"], *single)}
        name = kernel.__name__
        taken[name] = needs(kernel, lambda name, of=types: found(of, name), constants, capability)
    return taken


def main() -> None:
    capability, given = int(sys.argv[1]), json.loads(sys.argv[2])
    groups = {
        "passes": passes(capability, *given["passes"]),
        "sums": sums(capability, *given["sums"]),
        "segments": segments(capability, given["segments"], steps_alone=capability < 90),
    }
    if capability < 90:
        groups["stored"] = stored(capability)
    sys.stdout.write(json.dumps(groups) + "\n")


if __name__ == "__main__":
    main()
