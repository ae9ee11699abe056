"""The result of `matrix_transport`: value and bounds, and the plan, computed when it is asked for.

`solver.matrix.transport` makes it; users and `shift.pooled` read it. At a positive epsilon the plan
comes from the potentials and the costs of the call, which the result holds. `save` writes
potentials, masses and numbers in two files, and `load` takes the costs again. The keys and names in
these files are a format on disk: results of earlier versions must stay readable, and other costs
must be refused (`tests/matrix/test_saved.py`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.checks import array, shown
from otdd_flash.cost.compute import Compute
from otdd_flash.derivatives.groups import settle
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import json_content
from otdd_flash.files.tensor_file import read_result, write_result
from otdd_flash.operators.given_costs import CostSource, exact_blocks
from otdd_flash.real_numbers import in_one_row, real_tensor
from otdd_flash.shown import bounded, convergence_text
from otdd_flash.solver.matrix_comparison import Costs, MatrixComparison
from otdd_flash.solver.penalties import Unbalanced, penalties_of
from otdd_flash.solver.term import ExactTerm, StoppedBy, TransportTerm, plan_tensors, with_plan


@dataclass(frozen=True, eq=False, repr=False)
class MatrixTransport:
    """OT_epsilon for a cost matrix C (n, m), with bounds of its value.

    Tensors stay on the device that computed them. The plan is computed from the costs of the call,
    which must not be changed in place as long as the plan is used.

    Attributes:
        term: the solved transport problem: potentials, value, bounds, and why it stopped.
        seconds: wall time of the call.
        short_rows: (k,) int64, rows that have more mass than the columns they may use. No plan then
            has these masses, and the solve cannot converge. Else empty.
    """

    term: TransportTerm
    seconds: float
    short_rows: Tensor
    _comparison: MatrixComparison = field(repr=False)
    _required: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        """Return the value, its solver bounds and the size of the matrix, in one line."""
        return (
            f"MatrixTransport({bounded(self.value, *self.bounds)}, "
            f"epsilon={self.epsilon:.6g}, {convergence_text(self.converged)}, "
            f"{len(self.term.f)} x {len(self.term.g)})"
        )

    @property
    def f(self) -> Tensor:
        """Row potential (n,), in units of the cost; inf at a mass of 0 without allowed pairs.

        Offsets between groups of points that exchange almost no mass are set to balance the flows
        between these groups.

        Raises:
            ConvergenceError: the masses do not determine potentials, and convergence was required.

        Warns:
            NotConvergedWarning: the masses do not determine potentials, and it was not required;
                warned once.
        """
        return self._shown(self._settled.f, 0)

    @property
    def g(self) -> Tensor:
        """Column potential (m,), as `f`."""
        return self._shown(self._settled.g, 1)

    @property
    def value(self) -> float:
        """The dual value D(f, g); at epsilon 0 the cost of the plan, inf if no plan was found.

        Stopped by `schedule`, it is geomloss's number.
        """
        return self.term.value

    @property
    def mass(self) -> float:
        """The mass that the plan moves in all; 1 unless marginals are relaxed."""
        return self.term.mass

    @property
    def bounds(self) -> tuple[float, float]:
        """Solver bounds (lower, upper): an interval that holds OT_epsilon of the given matrix.

        With forbidden pairs the upper bound is for the masses up to rounding. It is inf if no plan
        with these masses was found.
        """
        return self.term.bounds

    @property
    def epsilon(self) -> float:
        """Entropic regularisation, in units of the cost."""
        return self.term.epsilon

    @property
    def marginal_error(self) -> float:
        """A bound of the larger of ||P 1 - a||_1 and ||P^T 1 - b||_1, rounding included.

        Relaxed marginals have what they owe for a and b, and the error is relative to `mass`.
        """
        return self.term.marginal_error

    @property
    def tolerance(self) -> float | None:
        """The stopping tolerance; None where the width of the solver bounds decided."""
        return self.term.tolerance

    @property
    def iterations(self) -> int:
        """Updates of both potentials, the certifying one included."""
        return self.term.iterations

    @property
    def passes(self) -> float:
        """Evaluations of all costs, not counting the one for their range and mean."""
        return self.term.passes

    @property
    def converged(self) -> bool:
        """Whether the solve reached what the options ask for."""
        return self.term.converged

    @property
    def stopped_by(self) -> StoppedBy:
        """The reason why the solve ended."""
        return self.term.stopped_by

    @computes
    def plan(self) -> Tensor:
        """Compute P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), (n, m).

        It has the type of the potentials, and is 0 at forbidden pairs and at masses of 0. At
        epsilon 0 it is a sparse COO tensor, float64.
        """
        if isinstance(self.term, ExactTerm):
            return self.term.plan()
        comparison = self._comparison
        return comparison.torch_operator("xy").plan_entries(
            self.term.f, self.term.g, self.epsilon, comparison.dtype
        )

    @computes
    @takes(values=array("(m, k)"))
    def apply(self, values: Any) -> Tensor:
        """Return P V (n, k) for V (m, k), or (n,) for (m,), in the type of the potentials.

        Raises:
            InputError: V does not fit.
        """
        return self._applied(values, transposed=False)

    @computes
    @takes(values=array("(m, k)"))
    def apply_transposed(self, values: Any) -> Tensor:
        """Return P^T U (m, k) for U (n, k), or (m,) for (n,).

        Raises:
            InputError: U does not fit.
        """
        return self._applied(values, transposed=True)

    @cached_property
    @computes
    def transport_cost(self) -> float:
        """The transport cost <C, P>, in units of the cost."""
        if isinstance(self.term, ExactTerm):
            return self.term.value
        operator, term, total = self._comparison.torch_operator("xy"), self.term, 0.0
        for rows, plan in operator.exact_tiles(term.f, term.g, self.epsilon):
            costs = self._comparison.source.rows(rows).double()
            paid = torch.where(costs < math.inf, costs * plan, 0) @ operator.b
            total += float(operator.a[rows] @ paid)
        return total

    @takes()
    def save(self, path: str | Path) -> None:
        """Write result.json and result.safetensors: potentials, masses and numbers, not the costs.

        Raises:
            InputError: the folder cannot be written.
        """
        comparison = self._comparison
        shape, given = list(comparison.source.shape), penalties_of(comparison.constraints)
        summary = {
            "epsilon": self.epsilon,
            **self.term.to_dict(),
            "seconds": self.seconds,
            "costs": {
                "shape": shape,
                "fingerprint": fingerprint(comparison.source),
            },
            "precision": comparison.compute.precision,
            **({} if given is None else {"unbalanced": given}),
        }
        tensors = {"f": self.term.f, "g": self.term.g, "a": comparison.a, "b": comparison.b}
        tensors |= {"short_rows": self.short_rows, **plan_tensors("xy", self.term)}
        write_result(Path(path), json_content(summary), tensors)

    @classmethod
    @takes()
    def load(
        cls, path: str | Path, costs: Costs, *, compute: Compute | None = None
    ) -> MatrixTransport:
        """Read what `save` wrote, for the same costs.

        Args:
            path: the folder.
            costs: the matrix, or the function of blocks, that was solved for.
            compute: where and how the plan is computed; by default where the costs are.

        Raises:
            InputError: no complete result, or other costs.
        """

        def restore(summary: dict[str, Any], tensors: dict[str, Tensor]) -> _Saved:
            f, g = tensors["f"], tensors["g"]
            term = TransportTerm.from_dict(f, g, summary["epsilon"], summary)
            return _Saved(
                with_plan("xy", term, tensors),
                (tensors["a"], tensors["b"]),
                tensors["short_rows"],
                summary["seconds"],
                summary["costs"]["fingerprint"],
                summary["precision"],
                summary.get("unbalanced"),
            )

        saved = read_result(Path(path), restore, "MatrixTransport")
        comparison = MatrixComparison.prepare(
            costs, *saved.masses, compute, precision=saved.precision
        )
        if comparison.source.shape != tuple(map(len, saved.masses)) or (
            fingerprint(comparison.source) != saved.fingerprint
        ):
            raise InputError(
                f"{path} holds the result of other costs; pass those that were solved for, in the "
                "same type"
            )
        comparison = comparison.with_penalties(saved.unbalanced)
        short, device = saved.short_rows.to(comparison.device), comparison.device
        return cls(saved.term.moved(device), saved.seconds, short, comparison)

    @cached_property
    @computes
    def _settled(self) -> TransportTerm:
        """The term with balanced offsets between groups of points; as it is if there is no plan.

        At epsilon 0 as well: its potentials are those that prove the lower bound.
        """
        if isinstance(self.term, ExactTerm):
            return self.term
        return settle(self._comparison, self.term, "potentials", required=self._required)

    def _shown(self, potential: Tensor, side: int) -> Tensor:
        partners = self._comparison.facts.partners
        return potential if partners is None else torch.where(partners[side], potential, math.inf)

    def _applied(self, values: Any, *, transposed: bool) -> Tensor:
        size = self._comparison.source.shape[0 if transposed else 1]
        given = real_tensor("values", values).detach().to(self._comparison.device)
        if given.ndim not in (1, 2) or len(given) != size:
            raise InputError(f"values must be ({size},) or ({size}, k), got {shown(given)}")
        columns = given[:, None] if given.ndim == 1 else given
        if isinstance(self.term, ExactTerm):
            applied = self.term.applied(columns, transposed=transposed).values
            return applied[:, 0] if given.ndim == 1 else applied
        plan = self._comparison.torch_operator("xy").plan(self.term.f, self.term.g, self.epsilon)
        found = plan.applied(columns, transposed=transposed)
        return found.values[:, 0] if given.ndim == 1 else found.values


class _Saved(NamedTuple):
    """The content of saved files, on the CPU."""

    term: TransportTerm
    masses: tuple[Tensor, Tensor]
    short_rows: Tensor
    seconds: float
    fingerprint: str
    precision: str
    unbalanced: Unbalanced | None


def fingerprint(source: CostSource) -> str:
    """Return the SHA-256 of type, shape and values, row by row."""
    digest = hashlib.sha256(f"{source.dtype}{tuple(source.shape)}".encode())
    for _, block in exact_blocks(source):
        digest.update(in_one_row(block.cpu()).view(torch.uint8).numpy().data)
    return digest.hexdigest()
