"""Where kernels find a cost matrix: its address and the stride between rows, in device memory.

What a launch takes by value is fixed when a CUDA graph records it; what its kernel loads is not. So
one recording serves every matrix of a shape, a type and an alignment. `operators.matrix_kernel` and
`operators.kernel_pool` make a `Place`; the kernels of this folder but `half_step` read it by
`load_place`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of which address and rows of an aligned matrix are multiples: what a thread loads at once.
ALIGNMENT = 16

TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


class Place(NamedTuple):
    """A matrix (n, m) whose rows are contiguous; the caller must keep the matrix alive.

    Attributes:
        numbers: (4,) int64, its address, how many entries a row starts after the last, n and m.
        dtype: float16, bfloat16 or float32.
        aligned: of `is_aligned`.
    """

    numbers: Tensor
    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, matrix: Tensor) -> Place:
        numbers = torch.tensor(numbers_of(matrix), dtype=torch.int64).to(matrix.device)
        return cls(numbers, matrix.dtype, is_aligned(matrix))

    @property
    def constants(self) -> dict[str, Any]:
        """Constants that kernels are compiled for; ALIGNED in entries, 1 if not aligned."""
        aligned = ALIGNMENT // self.dtype.itemsize if self.aligned else 1
        return {"TYPE": TYPES[self.dtype], "ALIGNED": aligned}


def numbers_of(matrix: Tensor) -> tuple[int, int, int, int]:
    """The numbers of a place."""
    return matrix.data_ptr(), matrix.stride(0), matrix.shape[0], matrix.shape[1]


def is_aligned(matrix: Tensor) -> bool:
    """Whether the address of a matrix and the bytes of its rows are multiples of `ALIGNMENT`."""
    address, *sizes = matrix.data_ptr(), matrix.stride(0), matrix.shape[1]
    return address % ALIGNMENT == 0 and all(
        size * matrix.itemsize % ALIGNMENT == 0 for size in sizes
    )


@triton.jit
def load_place(place_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the matrix, its stride, and n and m."""
    costs_ptr = tl.load(place_ptr).to(tl.pointer_type(TYPE))
    stride = tl.load(place_ptr + 1)
    n, m = tl.load(place_ptr + 2).to(tl.int32), tl.load(place_ptr + 3).to(tl.int32)
    if ALIGNED > 1:
        costs_ptr = tl.multiple_of(costs_ptr, 16)
        stride, m = tl.multiple_of(stride, ALIGNED), tl.multiple_of(m, ALIGNED)
    return costs_ptr, stride, n, m
