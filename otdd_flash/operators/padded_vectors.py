"""The vectors of transport problems that are padded to one length, in float64 and plain PyTorch.

`segments` says what they are. Entries of padding have no mass, and their residuals are 0. The
candidates are the potentials of the columns, which the problems hold themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.segments import Move
from otdd_flash.formulas.evidence import Evaluation, Products


class PaddedVectors:
    """The vectors of S segments of m columns, (S, m) each; 8 (4 + 2 memory) S m bytes.

    Args:
        masses: (S, m) float64, of the columns; 0 for padding.
        memory: how many differences are remembered.

    Attributes:
        fresh: residuals of the candidates that were evaluated last.
        kept: the potentials that were kept last.
        residual: theirs.
    """

    def __init__(self, masses: Tensor, memory: int) -> None:
        self._masses, self.memory = masses, memory
        self.fresh = self.kept = self.residual = self._level = torch.zeros_like(masses)
        count, m = masses.shape
        self._remembered = masses.new_zeros((count, 2 * memory, m))

    def evaluate(
        self, rows: tuple[Tensor, Tensor], potential: Tensor, updated: Tensor, epsilon: Tensor
    ) -> Evaluation:
        """What the candidates show.

        Args:
            rows: the potentials f (S, n) and the masses a (S, n).
            potential: (S, m) the candidates g.
            updated: (S, m) the softmin of f.
            epsilon: (S,).
        """
        masses, support = self._masses, self._masses > 0
        self.fresh = updated - potential
        fresh = torch.where(support, self.fresh, 0)
        change = (fresh / -epsilon[:, None]).exp()
        step, difference = potential - self.kept, self.residual - fresh
        lowest = torch.where(support, potential, torch.inf).amin(1)
        highest = torch.where(support, potential, -torch.inf).amax(1)
        value, size, gap, mass, *products = totals(
            torch.stack(
                (
                    potential,
                    potential.abs(),
                    (change - 1).abs(),
                    change,
                    step,
                    difference,
                    fresh,
                    step * step,
                    step * difference,
                    difference * difference,
                    step * fresh,
                    difference * fresh,
                )
            )
            * masses
        )
        weighted = torch.stack((difference, fresh), 1) * masses[:, None]
        remembered = totals(self._remembered[:, None] * weighted[:, :, None])
        f, a = rows
        row_value, row_size = totals(torch.stack((f, f.abs())) * a)
        numbers = (row_value, row_size, value, size, lowest, highest, gap, mass, *products)
        each = [Products(*products.chunk(2, 1)) for products in remembered.unbind(1)]
        return Evaluation(*numbers, *each)

    def move(self, potential: Tensor, move: Move, active: Tensor) -> Tensor:
        """The candidates (S, m) after those that were evaluated."""
        support = self._masses > 0
        newest = torch.stack((potential - self.kept, self.residual - self.fresh), 1)
        newest = newest - torch.stack((move.mean_step, move.mean_difference), 1)[:, :, None]
        kept = (move.kept & active)[:, None]
        self._remember(torch.where(support[:, None], newest, 0), move.slot, move.learnt & active)
        self.kept = torch.where(kept, potential, self.kept)
        self.residual = torch.where(kept, self.fresh, self.residual)
        moved = self.kept + move.scale[:, None] * self.residual + move.shift[:, None]
        moved = moved + _halved(move.weights[:, :, None] * self._remembered)
        moved = torch.where(support, moved, self.kept + self.residual)
        ahead = moved + move.extrapolation[:, None] * (moved - self._level)
        self._level = torch.where((move.ends & active)[:, None], moved, self._level)
        return torch.where(active[:, None], ahead, potential)

    def keep(self, order: Tensor) -> None:
        self._masses, self.fresh = self._masses[order], self.fresh[order]
        self.kept, self.residual = self.kept[order], self.residual[order]
        self._remembered, self._level = self._remembered[order], self._level[order]

    def _remember(self, newest: Tensor, slot: Tensor, where: Tensor) -> None:
        """Put vectors (S, 2, m), a step and its residual difference, into their slots."""
        segments = torch.arange(len(slot), device=slot.device)[:, None]
        place = segments, torch.stack((slot, slot + self.memory), 1)
        self._remembered[place] = torch.where(where[:, None, None], newest, self._remembered[place])


def _halved(values: Tensor) -> Tensor:
    """Sums over the middle dimension (S, 2^k, m), one half added to the other k times."""
    while values.shape[1] > 1:
        one, other = values.chunk(2, 1)
        values = one + other
    return values.squeeze(1)


def totals(values: Tensor) -> Tensor:
    """Sums along the last dimension, sixteen numbers at a time.

    How PyTorch adds up more of them depends on how many other sums there are.
    """
    while values.shape[-1] > 1:
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))
        values = padded.unflatten(-1, (-1, 16)).sum(-1)  # type: ignore[no-untyped-call]
    return values.squeeze(-1)
