"""The vectors of transport problems that are padded to one length, in float64 and plain PyTorch.

`segments` says what they are. Entries of padding have no mass, and their residuals are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.segments import Move, TorchProblems
from otdd_flash.formulas.evidence import Evaluation, Products


class ManyVectors:
    """The vectors of S problems of m columns, (S, m) each; 8 (5 + 2 memory) S m bytes.

    Args:
        problems: whose softmins are evaluated.
        candidate: (S, m), the first potentials, in the type in which they are stored.
        memory: how many differences are remembered.

    Attributes:
        memory: likewise.
        rows: (S, n), the potentials f of the last evaluation; None of clouds with themselves.
        kept: (S, m) float64, the potentials of columns that were kept last.
        residual: (S, m) float64, theirs.
    """

    def __init__(self, problems: TorchProblems, candidate: Tensor, memory: int) -> None:
        self._problems, self.memory = problems, memory
        self.begin(candidate)

    def begin(self, candidate: Tensor) -> None:
        """Begin afresh with other problems, which stand where the last ones did."""
        self._candidate = candidate
        masses, row_masses = self._problems.column_masses, self._problems.row_masses
        self.rows = None
        if row_masses is not None:
            self.rows = torch.zeros_like(row_masses, dtype=candidate.dtype)
        self.kept = candidate.double()
        self._fresh = self.residual = self._level = torch.zeros_like(masses)
        count, m = masses.shape
        self._remembered = masses.new_zeros((count, 2 * self.memory, m))
        self._every, self._left = candidate.clone(), torch.arange(count, device=candidate.device)

    def go_on_from(self, candidate: Tensor) -> None:
        """Evaluate other potentials (S, m) next."""
        self._candidate = candidate

    @property
    def updated(self) -> Tensor:
        """T'(T(g)) (S, m) float64 of the g kept last, or T(g); g before any evaluation."""
        return self.kept + self.residual

    @property
    def candidates(self) -> Tensor:
        """The last candidates of all problems, those that were left out included."""
        self._every[self._left] = self._candidate
        return self._every

    def evaluate(self, epsilon: Tensor, active: Tensor) -> Evaluation:
        """Evaluate the candidates g; numbers of problems that are not active are unspecified.

        Args:
            epsilon: (S,) float64.
            active: (S,) bool.
        """
        self.rows, updated = self._problems.softmins(self._candidate, self.rows, epsilon, active)
        masses, potential = self._problems.column_masses, self._candidate.double()
        support = masses > 0
        self._fresh = updated.double() - potential
        fresh = torch.where(support, self._fresh, 0)
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
        f, a = potential, masses
        if self.rows is not None and self._problems.row_masses is not None:
            f, a = self.rows.double(), self._problems.row_masses
        row_value, row_size = totals(torch.stack((f, f.abs())) * a)
        numbers = (row_value, row_size, value, size, lowest, highest, gap, mass, *products)
        each = [Products(*products.chunk(2, 1)) for products in remembered.unbind(1)]
        return Evaluation(*numbers, *each)

    def move(self, move: Move, active: Tensor) -> None:
        """Choose the next candidates; the vectors of problems that are not active stay."""
        support, potential = self._problems.column_masses > 0, self._candidate.double()
        newest = torch.stack((potential - self.kept, self.residual - self._fresh), 1)
        newest = newest - torch.stack((move.mean_step, move.mean_difference), 1)[:, :, None]
        kept = (move.kept & active)[:, None]
        self._remember(torch.where(support[:, None], newest, 0), move.slot, move.learnt & active)
        self.kept = torch.where(kept, potential, self.kept)
        self.residual = torch.where(kept, self._fresh, self.residual)
        moved = self.kept + move.scale[:, None] * self.residual + move.shift[:, None]
        moved = moved + _halved(move.weights[:, :, None] * self._remembered)
        moved = torch.where(support, moved, self.kept + self.residual)
        ahead = moved + move.extrapolation[:, None] * (moved - self._level)
        self._level = torch.where((move.ends & active)[:, None], moved, self._level)
        ahead = torch.where(active[:, None], ahead, potential)
        self._candidate = ahead.to(self._candidate.dtype)

    def keep(self, order: Tensor) -> None:
        """Go on with some problems (S',); the problems keep theirs first."""
        self._every[self._left] = self._candidate
        self._left, self._candidate = self._left[order], self._candidate[order]
        self.rows = None if self.rows is None else self.rows[order]
        self._fresh, self.kept = self._fresh[order], self.kept[order]
        self.residual, self._level = self.residual[order], self._level[order]
        self._remembered = self._remembered[order]

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
