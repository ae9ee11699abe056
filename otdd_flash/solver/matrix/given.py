"""Checks of the arguments of `matrix_transport`: matrices, masses, and costs within both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.matrix import HeldCosts, exact_blocks
from otdd_flash.real_numbers import in_double, in_floating_point, real_tensor
from otdd_flash.solver.tensor_problem import MASS_TOLERANCE

HELD_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Unit roundoffs, of the largest entry, up to which a matrix counts as symmetric.
SYMMETRIC_UNITS = 64


class SelfCosts(NamedTuple):
    """A matrix C (n, n) for (C + C^T) / 2, and its errors max_j |C_ij - C_ji| / 2 (n,), float64."""

    matrix: Tensor
    errors: Tensor


def given_matrix(name: str, given: Any) -> Tensor:
    """Return a matrix (n, m), detached, in a type that costs are stored in.

    Raises:
        InputError: it is no real matrix, or has no rows or columns.
    """
    matrix = real_tensor(name, given).detach()
    if matrix.ndim != 2 or min(matrix.shape) < 1:
        raise InputError(f"{name} must be a matrix (n, m), got shape {tuple(matrix.shape)}")
    return matrix if matrix.dtype in HELD_TYPES else in_floating_point(name, matrix)


def checked_masses(name: str, given: Any, size: int) -> Tensor:
    """Return masses (size,) float64 that sum to 1; uniform for None.

    Raises:
        InputError: another shape, a mass that is negative or not finite, or another sum.
    """
    if given is None:
        return torch.full((size,), 1 / size, dtype=torch.float64)
    masses = in_double(name, real_tensor(name, given).detach())
    if masses.shape != (size,):
        raise InputError(f"{name} must have shape ({size},), got {tuple(masses.shape)}")
    least, most, total = torch.stack((masses.amin(), masses.amax(), masses.sum())).tolist()
    if not (least >= 0 and most < torch.inf):
        place = int((~((masses >= 0) & (masses < torch.inf))).nonzero()[0])
        raise InputError(
            f"{name} must be finite and not negative; {name}[{place}] is {float(masses[place])}"
        )
    if abs(total - 1) > MASS_TOLERANCE:
        raise InputError(f"{name} must sum to 1, got {total:.8g}; divide it by its sum")
    shares: Tensor = masses / total
    # Division by subnormal masses would overflow: they count as 0.
    return torch.where(shares < torch.finfo(shares.dtype).tiny, 0, shares)


def checked_self_costs(
    given: Sequence[Tensor], sizes: tuple[int, int], device: torch.device
) -> tuple[SelfCosts, SelfCosts]:
    """Return the costs within both sides, (n, n) and (m, m), on the device.

    Raises:
        InputError: another shape, an entry that is not finite, or no symmetry.
    """
    found = []
    for place, (costs, size) in enumerate(zip(given, sizes, strict=True)):
        name = f"self_costs[{place}]"
        matrix = given_matrix(name, costs).to(device)
        if matrix.shape != (size, size):
            raise InputError(
                f"{name} must have shape {(size, size)} beside costs {sizes}, got "
                f"{tuple(matrix.shape)}"
            )
        found.append(SelfCosts(matrix, _asymmetry(name, matrix)))
    return found[0], found[1]


def _asymmetry(name: str, matrix: Tensor) -> Tensor:
    """Return max_j |C_ij - C_ji| / 2 (n,), float64.

    Raises:
        InputError: an entry is not finite, or differs by more than roundings from its mirror image.
    """
    errors = torch.empty(len(matrix), dtype=torch.float64, device=matrix.device)
    largest = 0.0
    for rows, block in exact_blocks(HeldCosts(matrix)):
        finite = block.isfinite()
        if not bool(finite.all()):
            row, column = (~finite).nonzero()[0].tolist()
            raise InputError(
                f"{name} must be finite; {name}[{rows.start + row}, {column}] is "
                f"{float(block[row, column])}"
            )
        costs = block.double()
        errors[rows] = (costs - matrix[:, rows].T).abs().amax(1) / 2
        largest = max(largest, float(costs.abs().max()))
    row = int(errors.argmax())
    if 2 * float(errors[row]) > SYMMETRIC_UNITS * torch.finfo(matrix.dtype).eps * largest:
        column = int((matrix[row].double() - matrix[:, row].double()).abs().argmax())
        raise InputError(
            f"{name} must be symmetric; {name}[{row}, {column}] is {float(matrix[row, column]):g} "
            f"and {name}[{column}, {row}] is {float(matrix[column, row]):g}; give (C + C.T) / 2"
        )
    return errors
