"""What is derived from epsilon on the device has the bits that the host gets."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE

from otdd_flash.kernels.epsilon import load_scales, log2_scale, on_device

EPSILONS = [1e-6, 0.01, 0.1, 1 / 3, 1.0, 7.77, 1e5]
# Of coordinates scaled by a power of two, or as on a lattice.
PRODUCT_SCALES = [2 * 0.7 / 2.0**28, 1 / 255**2]


@triton.jit
def scales_kernel(out_ptr, epsilon_ptr, product_scale: tl.float64):
    scale, costs_scale = load_scales(epsilon_ptr, product_scale)
    tl.store(out_ptr, scale)
    tl.store(out_ptr + 1, costs_scale)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("product_scale", PRODUCT_SCALES)
def test_kernels_scale_like_the_host(epsilon, product_scale):
    out = torch.empty(2, device=DEVICE)
    scales_kernel[(1,)](out, on_device(epsilon, DEVICE), product_scale)
    scale = math.log2(math.e) / epsilon
    expected = torch.tensor([product_scale * scale, scale], dtype=torch.float32)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_pytorch_scales_like_the_host(epsilon):
    assert float(log2_scale(on_device(epsilon, DEVICE))) == math.log2(math.e) / epsilon


def test_a_tensor_is_read_where_it_is():
    level = torch.ones((), dtype=torch.float64, device=DEVICE)
    assert on_device(level, DEVICE) is level
