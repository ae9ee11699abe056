"""Conjugate gradients in Triton: `conjugate_gradients` says what they are.

All vectors and numbers of a step lie in the device's memory, at places that stay the same. A step
is its products and one launch more, or a few with a preconditioner; it asks the device nothing and
can be recorded. A recording serves all later solves of a system with as many right-hand sides.

`derivatives.plan_system` makes `KernelIterates` for products of packed points. A change must keep
that a step leaves the host alone (`tests/derivatives/test_recorded_systems.py`), and that the
iterations are those of `conjugate_gradients` (`tests/kernels/test_linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from otdd_flash.engine.conjugate_gradients import AIM, Limits, Metric, Near, System
from otdd_flash.engine.recording import Repeated
from otdd_flash.kernels.linear.cg_start import BEGIN, CORRECT, RESUME, Kept, cg_start
from otdd_flash.kernels.linear.cg_step import Image, Numbers, Vectors, cg_step, cg_turn
from otdd_flash.kernels.linear.halves import to_halves
from otdd_flash.kernels.passes.fused_product import NARROW

# Rows up to which a step takes less time than to launch it; a recording then pays, though it takes
# steps two at a time, of which the last may be in vain.
RECORDED_ROWS = 1 << 13


class KernelIterates:
    """The state of s iterations, as `conjugate_gradients.Iterates` has it, for kernels.

    Args:
        metric: of the system that is solved.
        limits: when to stop.
        shape: (m, s) of the right-hand sides.
    """

    def __init__(self, metric: Metric, limits: Limits, shape: tuple[int, int]) -> None:
        (m, count), device = shape, metric.total.device
        self._metric, self._limits = metric, limits
        vectors = torch.empty((6, count, m), dtype=torch.float64, device=device).transpose(1, 2)
        numbers = torch.empty((7, count), dtype=torch.float64, device=device)
        counts = torch.empty((3, count), dtype=torch.int64, device=device)
        flags = torch.empty((3, count), dtype=torch.bool, device=device)
        self._right, self.values, self.left, *moving = vectors
        self.size, self.now, self.target, *others = numbers
        self.taken, self.iterations, most = counts
        self._wanted, (self.pending, self.missed, self.active) = flags[:2], flags
        self._kept = Kept(
            self._right, self.values, self.left,
            self.size, self.now, self.target, self.taken, self.pending, self.missed,
        )  # fmt: skip
        self._vectors = Vectors(*moving)
        self.correction, self.residual, self.direction = self._vectors
        self.square, self.energy, self.unknown, goal = others
        self._numbers = Numbers(
            self.square, self.energy, self.unknown, self.iterations, self.active, goal, most
        )
        # Of the systems that iterations were of.
        self._places: dict[System, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._repeated: dict[tuple[System, bool, Any], Repeated] = {}

    def begin(self, right: Tensor, near: Near) -> None:
        """Start from 0 for right-hand sides (m, s), of any strides."""
        self._near, self._started = near, True
        self._start(right, BEGIN)

    def resume(self, near: Near) -> None:
        """Restart with the system and preconditioner of `near`, where the tolerance is missed."""
        self._near, self._started = near, True
        self._start(None, RESUME)

    def repeat(self) -> None:
        """Make one step; for so few rows that launches take longer, make several recorded ones."""
        few, near = len(self.values) <= RECORDED_ROWS, self._near.system
        if not few or not self.values.is_cuda or near.layout is None:
            self.step()
            return
        # A recording is replayed on the stream that its memory belongs to.
        stream = torch.cuda.current_stream(self.values.device)
        way = near, self._preconditioned, stream
        self._repeated.setdefault(way, Repeated()).run(self.step)

    def wanted(self) -> tuple[bool, bool]:
        """Return whether any correction is due, and whether any tolerance is missed; wait for both.

        After a start both are taken to be so without waiting: they are, unless all right-hand sides
        are 0, whose steps change nothing.
        """
        if self._started:
            return True, True
        pending, missed = self._wanted.tolist()
        return any(pending), any(missed)

    def step(self) -> None:
        """Make a step of conjugate gradients for all active right-hand sides."""
        near = self._near.system
        metric = near.metric
        cg_step(
            self._image(),
            (metric.masses, metric.total),
            self._vectors,
            self._numbers,
            self._place[1],
            near.precision,
            constants=metric.constants,
            preconditioned=self._preconditioned,
        )
        self._turn()

    @property
    def _preconditioned(self) -> bool:
        return self._near.preconditioner is not None

    def _turn(self) -> None:
        """Compute the next directions from preconditioned residuals, if they are preconditioned."""
        near = self._near
        if near.preconditioner is not None:
            scaled = near.preconditioner.times(self.residual, near.system.metric.inverse)
            cg_turn(scaled, self._place[0], self._vectors, self._numbers, self._place[1])

    def _image(self) -> Image:
        near = self._near.system
        if near.layout is None:
            return Image.of(near.times(self.direction))
        return near.image(*self._place[1])

    @property
    def _place(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The rows of points, and the memory for packed directions and their scales."""
        near, (m, count) = self._near.system, self.values.shape
        if near not in self._places:
            layout, device = near.layout, self.values.device
            position = torch.arange(m, device=device) if layout is None else layout.position
            rows = m if layout is None else layout.size
            packed = torch.zeros((rows, 2, count), dtype=torch.float16, device=device)
            self._places[near] = position, (packed, torch.empty_like(self.size))
        return self._places[near]

    def correct(self, system: System) -> None:
        """Add the correction if it lowers the true residual; restart if it halves it.

        Do not restart after as many iterations as a correction may have: a better preconditioner,
        or another system, is due then.
        """
        self._started = False
        values = self.values + self.correction
        if system.layout is None:
            image = Image.of(system.times(values))
        else:
            # Widths that fused products have anyway.
            image = system.image(*to_halves(values, system.layout, multiple=NARROW))
        self._start(image, CORRECT)

    def _start(self, given: Tensor | Image | None, stage: tl.constexpr) -> None:
        metric, (position, packed) = self._metric, self._place
        tolerance, iterations = self._limits
        most = iterations if self._near.most is None else self._near.most
        cg_start(
            given,
            (metric.masses, metric.total, self._near.system.metric.masses),
            position,
            self._kept,
            self._vectors,
            self._numbers,
            packed,
            (tolerance, AIM, iterations, most),
            stage,
            constants=metric.constants,
            preconditioned=self._preconditioned,
        )
        self._turn()
