"""What the segmented solver asks of many transport problems that it solves side by side.

A segment is one problem: a cost C (n, m) with masses a (n,) and b (m,), and its potentials f (n,)
and g (m,), which are kept with it. One update moves one potential of every segment; the solver sees
no more of them than a few numbers per segment. How scores are held and how potentials of different
lengths lie in memory is up to the implementation. What it computes for a segment must not depend on
the segments beside it, to the last bit.

An update over-relaxes (Thibault, Chizat, Dossal and Papadakis 2021, Overrelaxed Sinkhorn-Knopp
algorithm for regularized optimal transport): with the softmin T that makes a marginal exact and
delta = (T - u) / epsilon, a potential u becomes

    T + epsilon s,    s = (omega - 1) delta,    but at most log(1 + delta) where delta > 0.

A coordinate of mass w then adds w epsilon (delta + s - e^s + e^-delta) to the dual, which is not
negative for 0 < omega <= 2: at its cap it has the derivative 1 / (1 + delta) - e^-delta >= 0 in
delta, and for delta < 0 a derivative of the sign of delta. So any omega is safe, and 1 is Sinkhorn.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class WeightedPoints(NamedTuple):
    """A cloud.

    Attributes:
        points: (n, d), of any real type.
        masses: (n,) float64, positive, summing to 1.
    """

    points: Tensor
    masses: Tensor


class Update(NamedTuple):
    """What the update of a potential u with masses w has seen, T its softmin; all (S,) float64.

    The plan is that of the potentials before the update: the softmin yields its marginal for free.

    Attributes:
        gap: sum_i w_i |exp((u_i - T_i) / epsilon) - 1|, the L1 error of that marginal.
        mass: sum_i w_i exp((u_i - T_i) / epsilon), of the whole plan.
        value: <w, u>.
        size: <w, |u|>.
        lowest: min u over the support.
        highest: max u over the support.
        next_value: <w, T>.
        next_size: <w, |T|>.
    """

    gap: Tensor
    mass: Tensor
    value: Tensor
    size: Tensor
    lowest: Tensor
    highest: Tensor
    next_value: Tensor
    next_size: Tensor


def relaxed(
    potential: Tensor,
    softmin: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    relaxation: Tensor,
    active: Tensor,
) -> tuple[Tensor, Update]:
    """The update of potentials that are padded to one length, and what it has seen.

    Args:
        potential: (S, n) float64.
        softmin: (S, n).
        masses: (S, n), 0 for padding.
        epsilon: (S,).
        relaxation: (S,), omega.
        active: (S,) bool; the other potentials stay.
    """
    scale, support = epsilon.unsqueeze(1), masses > 0
    step = (softmin - potential) / scale
    beyond = (relaxation - 1).unsqueeze(1) * step
    capped = torch.minimum(beyond, step.clamp_min(0).log1p())
    after = softmin + scale * torch.where(step > 0, capped, beyond)
    after = torch.where(active.unsqueeze(1), after, potential)
    change = torch.where(support, step.neg(), 0).exp()
    parts = ((change - 1).abs(), change, potential, potential.abs(), softmin, softmin.abs())
    gap, mass, value, size, next_value, next_size = _totals(torch.stack(parts) * masses)
    lowest = torch.where(support, potential, torch.inf).amin(1)
    highest = torch.where(support, potential, -torch.inf).amax(1)
    return after, Update(gap, mass, value, size, lowest, highest, next_value, next_size)


def _totals(values: Tensor) -> Tensor:
    """Sums along the last dimension, sixteen numbers at a time.

    How PyTorch adds up more of them depends on how many other sums there are.
    """
    while values.shape[-1] > 1:
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))
        values = padded.unflatten(-1, (-1, 16)).sum(-1)  # type: ignore[no-untyped-call]
    return values.squeeze(-1)


class Segments(Protocol):
    """S transport problems and their potentials; all attributes of shape (S,) are float64.

    Costs may be known up to terms of one side, C_ij = C'_ij + p_i + q_j: potentials, spread and
    rounding then are those of C', and `offset` is what the value has to be raised by.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        ...

    @property
    def mean_cost(self) -> Tensor:
        """Bound on the mean |C'| over a plan, where epsilon scaling starts (S,)."""
        ...

    @property
    def cost_spread(self) -> Tensor:
        """R >= max C' - min C' over the support (S,)."""
        ...

    @property
    def cost_error(self) -> Tensor:
        """Bound on the rounding error of a computed C'_ij (S,)."""
        ...

    @property
    def offset(self) -> Tensor:
        """<a, p> + <b, q> (S,)."""
        ...

    @property
    def steps_between_looks(self) -> int:
        """How many iterations to run before asking the device which segments are done."""
        ...

    def coarse(self, tolerance: float) -> Segments | None:
        """The same problems and potentials in a faster form; None without one.

        It can reach a marginal error of `tolerance` if these problems can.
        """
        ...

    def update(self, side: int, epsilon: Tensor, relaxation: Tensor, active: Tensor) -> Update:
        """Move the potentials of rows (side 0) or columns (1) towards their softmin.

        Args:
            side: which; a problem of a cloud with itself has one potential, of side 0.
            epsilon: (S,) float64.
            relaxation: (S,) float64, omega.
            active: (S,) bool; other potentials stay, and what the update says of them is void.
        """
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the segments `order` (S',) only, in that order."""
        ...
