"""What kernels sum in an evaluation, in the words of the formulas."""

from __future__ import annotations

from torch import Tensor

from otdd_flash.formulas.evidence import Evaluation, Products
from otdd_flash.kernels.segments.evaluation import NUMBERS


def evaluation_of(rows: Tensor, columns: Tensor) -> Evaluation:
    """Unpack numbers of rows (S, 2) and of columns (S, 14 + 4 memory) in order."""
    numbers, products = columns[:, :NUMBERS], columns[:, NUMBERS:].chunk(4, 1)
    remembered = [Products(*products[:2]), Products(*products[2:])]
    return Evaluation(*rows.unbind(1), *numbers.unbind(1), *remembered, numbers[:, 8])
