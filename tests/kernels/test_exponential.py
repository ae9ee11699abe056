"""Powers of two in float64."""

from __future__ import annotations

import mpmath
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.matrix.exponential import exact_power_of_two

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def powers_kernel(exponents_ptr, out_ptr, count, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    exponents = tl.load(exponents_ptr + o, mask=o < count, other=0.0)
    tl.store(out_ptr + o, exact_power_of_two(exponents), mask=o < count)


def powers(exponents: Tensor) -> Tensor:
    found = torch.empty_like(exponents, device=DEVICE)
    block = triton.next_power_of_2(len(exponents))
    powers_kernel[(1,)](exponents.to(DEVICE), found, len(exponents), BLOCK=block)
    return found.cpu()


def test_they_are_known_to_two_units() -> None:
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(400, generator=draw, dtype=torch.float64)
    exponents = torch.cat(
        (spread - 0.5, 2040 * spread - 1020, torch.tensor([0.5, -0.5, 1.5, -1022, 1023]).double())
    )
    with mpmath.workdps(40):
        for exponent, found in zip(exponents.tolist(), powers(exponents).tolist(), strict=True):
            assert abs(mpmath.mpf(found) / mpmath.power(2, exponent) - 1) <= 2.0**-52


@pytest.mark.parametrize("exponent", [1024.0, 5000.0, 1e300])
def test_they_overflow(exponent: float) -> None:
    assert float(powers(torch.tensor([exponent], dtype=torch.float64))) == torch.inf
