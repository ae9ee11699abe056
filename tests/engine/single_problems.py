"""Random single problems, in PyTorch and as if their passes ran in Triton."""

from __future__ import annotations

from typing import Any

import reference
import torch
from torch import Tensor

from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class InTriton:
    """An operator of which all but its passes runs in kernels."""

    def __init__(self, operator: TorchOperator[Any]) -> None:
        self.inner = operator
        self.passes = operator.passes._replace(in_triton=True)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double().to(DEVICE)


def masses(n: int, seed: int = 1, *, zeros: bool = False) -> Tensor:
    weights = draw(n, seed=seed).abs() + 0.1
    if zeros and n > 2:
        weights[::3] = 0
    return weights / weights.sum()


def problem(
    n: int, m: int | None = None, dtype: torch.dtype = torch.float32, *, zeros: bool = False
) -> TorchOperator[Any]:
    """Between two clouds, or of one with itself without m."""
    x, a = draw(n, 3, seed=n), masses(n, zeros=zeros)
    y, b = (x, a) if m is None else (draw(m, 3, seed=m + 1) + 1, masses(m, 2, zeros=zeros))
    return matrix_operator(reference.dense_cost(x, y).to(dtype), a, b)
