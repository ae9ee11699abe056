"""Compile kernels of Sinkhorn attention for sm_90; a script as `compile_tiled`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compiling import TYPES, needs

from otdd_flash.kernels.attention import (
    blocks_for,
    half_step_kernel,
    padded_width,
    plan_product_kernel,
    score_gradient_kernel,
)

MATRICES = ("rows_ptr", "columns_ptr", "values_ptr", "product_ptr", "matrix_ptr", "own_ptr")
MATRICES += ("row_factor_ptr", "column_factor_ptr")

KINDS = {
    half_step_kernel: ("vector", "matrix"),
    plan_product_kernel: ("vector", "matrix"),
}


def taken(kernel: Any, kind: str, width: int, dtype: torch.dtype, **constants: Any) -> Any:
    blocks = blocks_for(kind, padded_width(width), dtype, torch.device("cuda"))
    padded = padded_width(width)

    def type_of(name: str) -> str:
        of_gradient = kind == "gradient" and name == "out_ptr"
        if name in MATRICES or of_gradient:
            return TYPES[dtype]
        if name == "counts_ptr":
            return "*i32"
        if name == "near_ptr":
            return "*i1"
        return "*fp32" if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"

    with_matrix = kind != "vector"
    constants |= {
        "DIM": width,
        "WIDTH": width if with_matrix else 0,
        "BLOCK_D": padded,
        "BLOCK_E": padded if with_matrix else 0,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "HALF": dtype != torch.float32,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return needs(kernel, type_of, constants, 90, **options)


def main() -> None:
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width in map(int, sys.argv[1:]):
            for kernel, kinds in KINDS.items():
                for kind in kinds:
                    name = f"{kernel.__name__} {kind} {width} {dtype}"
                    of_step = {"GUESSED": kind == "vector"}
                    constants = of_step if kernel is half_step_kernel else {}
                    found[name] = taken(kernel, kind, width, dtype, **constants)
            kernel = score_gradient_kernel
            for near in (True, False):
                name = f"{kernel.__name__} {near} {width} {dtype}"
                constants = {"QUERIES": True, "TERMS": 6, "NEAR": near}
                found[name] = taken(kernel, "gradient", width, dtype, **constants)
    sys.stdout.write(json.dumps({"attention": found}) + "\n")


if __name__ == "__main__":
    main()
