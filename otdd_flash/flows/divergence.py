"""S_epsilon between moving particles and a fixed target, with its gradient, solved step after step.

The target's self term is solved once, or goes on at the next step where it was cut short. The other
two terms start from 2 u_k - u_(k-1), u the potentials of the steps before: on a smooth path they
move by nearly the same at every step, and the error of such a start is of second order in the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.flows.setting import FlowSetting
from otdd_flash.operators.request import Request
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence, report_convergence
from otdd_flash.solver.gradient import DivergenceGradient, Gradient, Needs
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.result import TransportTerm


class Batch(NamedTuple):
    """A part of both sides: rows (b,) of the particles and of the target."""

    particles: Tensor
    target: Tensor

    def only(self, rows: Tensor) -> Tensor:
        """Of rows (n, d), one a particle, those of the batch; 0 for the others."""
        return torch.zeros_like(rows).index_copy_(0, self.particles, rows[self.particles])


class TargetDivergence:
    """The divergence from a fixed target.

    Args:
        setting: regularisation and tolerance.
        request: the particles at the start and the target, if not those of the setting.
    """

    def __init__(self, setting: FlowSetting, request: Request | None = None) -> None:
        self._setting = setting
        self._request = request or setting.request
        self._self_term: TransportTerm | None = None
        # Of the last solve, and of the one before.
        self._potentials: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}

    def __call__(
        self,
        particles: LabeledSamples,
        table: Tensor | None,
        needs: Needs,
        batch: Batch | None = None,
    ) -> tuple[Divergence, Gradient]:
        """Solve, and differentiate by `needs`, of which "x" is that of the particles.

        Args:
            particles: n points.
            table: W (V_x + V_y, V_x + V_y), of which only the rows of the particles' classes may
                change from call to call; None is 0.
            needs: inputs of the divergence, as in `DivergenceGradient`.
            batch: solve between these rows only, from nothing; the gradient then is (b, d).

        Raises:
            ConvergenceError: the solver's options require convergence, and a term stopped early.
        """
        setting, (_, target) = self._setting, self._request.seen
        if batch is not None:
            particles, target = particles.take(batch.particles), target.take(batch.target)
        problem = Problem(self._request.at(particles, target), setting.epsilon, table)
        gradient = DivergenceGradient(problem, needs)
        with torch.no_grad():
            solved = problem.solve(
                setting.solver,
                start=None if batch is not None else self._start(),
                known=None if batch is not None else self._known(),
                progress=setting.progress,
                solved=gradient if needs else None,
            )
        if setting.solver.require_convergence:
            report_convergence(solved, setting.solver)
        if batch is not None:
            # Long steps of batches lead away from the last solve of the whole.
            self._potentials = self._earlier = {}
        elif not solved.identical:
            assert solved.xx is not None
            self._self_term = solved.yy
            self._earlier = self._potentials
            self._potentials = {"xy": solved.xy.g, "xx": solved.xx.f}
        return solved, gradient.total

    def state(self) -> dict[str, Any]:
        """What the next solve starts from."""
        return {"last": self._potentials, "earlier": self._earlier, "yy": self._self_term}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, on whichever device."""
        self._potentials, self._earlier = (
            {key: u.to(self._setting.request.device) for key, u in state[when].items()}
            for when in ("last", "earlier")
        )
        self._self_term = state["yy"]

    def _start(self) -> dict[str, Tensor]:
        last, earlier = self._potentials, self._earlier
        start = {key: 2 * u - earlier[key] if earlier else u for key, u in last.items()}
        return start if self._self_term is None else start | {"yy": self._self_term.g}

    def _known(self) -> dict[str, TransportTerm]:
        term = self._self_term
        return {"yy": term} if term is not None and term.converged else {}
