"""Small plans that fall apart into groups of points: which, and what is then undetermined.

`SmallPlans` asks when potentials are read, and before the first result where masses require a
gradient. Three tests follow each other, the next only for problems that one leaves open:

1. No entry of the plan P is less than twice a share of the largest a_i b_j: one read of all plans.
2. A group that starts at the heaviest column takes in all rows and columns with which it exchanges
   that share of the lighter one's mass: some products of plans and flags a round.
3. `derivatives.groups` in float64 on the host, one problem after another, up to the first with
   undetermined offsets, which is reported in the words of that chapter.

From that share on the rounding of the masses, of the type that is computed in, changes an offset by
`OPEN` epsilon at the most. The first test shows that every cut between groups has it: where one
side holds p of the rows' mass and q of the columns', p + q <= 1, twice the share of

    p (1 - q) + q (1 - p) >= (p + q) / 2

crosses, which is the share of the lighter side's mass.

Potentials are not balanced here, unlike in `derivatives.groups`: they stay where the iterations
ended. `batched.plans` calls `report_open`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.batched.chunks import parts
from otdd_flash.derivatives.group_flows import OPEN
from otdd_flash.derivatives.groups import groups_of_matrix, report_groups

# Units in which sums of masses are rounded, of the type's epsilon; in float64 `MASS_ROUNDING`.
UNITS = 2


def report_open(
    what: str,
    costs: Tensor,
    plans: Tensor,
    masses: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    epsilon: Tensor,
    sizes: Tensor | None,
) -> None:
    """Warn if groups of a problem exchange too little mass for their potentials to be determined.

    Args:
        what: the name of the numbers that depend on the offsets, in the plural.
        costs: C (B, n, m).
        plans: P (B, n, m).
        masses: a (n,) or (B, n), and b (m,) or (B, m), of the type that was computed in.
        potentials: f (B, n) and g (B, m), in units of the cost.
        epsilon: () or (B,) float64, in units of the cost.
        sizes: (B, 2), rows and columns of each problem; None for all.
    """
    count, dtype = len(plans), masses[0].dtype
    a, b = (given.expand(count, -1) for given in masses)
    rounding = UNITS * torch.finfo(dtype).eps
    share = rounding / OPEN
    least = 2 * share * a.amax(1) * b.amax(1)
    suspects = (plans.amin((1, 2)) < least).nonzero().squeeze(1)
    # As many at once as elsewhere, of the first ones' shape.
    for some in parts(plans[: len(suspects)]):
        chosen = suspects[some]
        apart = ~_grown(plans[chosen].to(dtype), a[chosen], b[chosen], share)
        for k in chosen[apart].tolist():
            n, m = plans.shape[1:] if sizes is None else sizes[k].tolist()
            groups = groups_of_matrix(
                costs[k, :n, :m].double().cpu(),
                (a[k, :n].double().cpu(), b[k, :m].double().cpu()),
                (potentials[0][k, :n].double().cpu(), potentials[1][k, :m].double().cpu()),
                float(epsilon.expand(count)[k]),
                rounding,
            )
            if groups is not None:
                named = f"{what} of problem {k}" if count > 1 else what
                report_groups(groups, named, required=False)
                return


def _grown(plans: Tensor, a: Tensor, b: Tensor, share: float) -> Tensor:
    """Return whether a group takes in all rows and columns with mass, (B,)."""
    rows, columns = torch.zeros_like(a), torch.zeros_like(b)
    columns.scatter_(1, b.argmax(1, keepdim=True), 1)
    size = columns.sum()

    def joined(flow: Tensor, masses: Tensor) -> Tensor:
        held = (rows * a).sum(1, keepdim=True) + (columns * b).sum(1, keepdim=True)
        return (flow >= share * torch.minimum(masses, held)) & (masses > 0)

    while True:
        rows = torch.maximum(rows, joined((plans @ columns[:, :, None])[:, :, 0], a).to(a))
        columns = torch.maximum(columns, joined((plans.mT @ rows[:, :, None])[:, :, 0], b).to(b))
        before, size = size, rows.sum() + columns.sum()
        if bool(size == before):
            return ((rows > 0) | (a == 0)).all(1) & ((columns > 0) | (b == 0)).all(1)
