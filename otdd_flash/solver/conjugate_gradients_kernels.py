"""Conjugate gradients in Triton: `conjugate_gradients` says what they are.

All vectors and numbers of a step lie in the device's memory, at places that stay the same: a step
is its products and one launch more, and asks the device nothing.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.linear.cg_start import BEGIN, CORRECT, RESUME, Kept, cg_start
from otdd_flash.kernels.linear.cg_step import Image, Numbers, Vectors, cg_step
from otdd_flash.solver.conjugate_gradients import AIM, Limits, Metric, System


class KernelIterates:
    """Where s directions are; as `conjugate_gradients.Iterates`, in kernels.

    Args:
        metric: of the system that is solved.
        right: right-hand sides (m, s) float64.
        limits: when to stop.
    """

    def __init__(self, metric: Metric, right: Tensor, limits: Limits) -> None:
        (m, count), device = right.shape, right.device
        self._metric, self._right, self._limits = metric, right, limits
        vectors = torch.empty((6, count, m), dtype=torch.float64, device=device).transpose(1, 2)
        numbers = torch.empty((6, count), dtype=torch.float64, device=device)
        counts = torch.empty((3, count), dtype=torch.int64, device=device)
        flags = torch.empty((2, count), dtype=torch.bool, device=device)
        right_in_range, self.values, self.left, *moving = vectors
        self.size, self.now, self.target, *others = numbers
        self.taken, self.iterations, most = counts
        self.pending, self.active = flags
        self._kept = Kept(
            right_in_range, self.values, self.left,
            self.size, self.now, self.target, self.taken, self.pending,
        )  # fmt: skip
        self._vectors = Vectors(*moving)
        self.correction, self.residual, self.direction = self._vectors
        self.energy, self.unknown, goal = others
        self._numbers = Numbers(self.energy, self.unknown, self.iterations, self.active, goal, most)
        self._begun = False

    def resume(self, near: System) -> None:
        """Iterate with a system, wherever the tolerance is not met."""
        self._near, layout = near, near.layout
        (m, count), device = self._right.shape, self._right.device
        self._position = torch.arange(m, device=device) if layout is None else layout.position
        rows = m if layout is None else layout.size
        self._packed = (
            torch.zeros((rows, 2, count), dtype=torch.float16, device=device),
            torch.empty_like(self.size),
        )
        self._start(self._right, RESUME if self._begun else BEGIN)
        self._begun = True

    def step(self) -> None:
        """Take a step of all active directions."""
        near = self._near
        metric = near.metric
        cg_step(
            self._image(),
            (metric.masses, metric.total),
            self._vectors,
            self._numbers,
            self._packed,
            near.precision,
            constants=metric.constants,
        )

    def _image(self) -> Image:
        near, (packed, scales) = self._near, self._packed
        if near.layout is not None:
            return near.image(packed, scales)
        found, masses = near.times(self.direction), near.metric.masses
        weights = torch.ones_like(masses), torch.zeros_like(masses)
        return Image(found[:, None], torch.ones_like(scales), *weights, self._position)

    def correct(self, system: System) -> None:
        """Take the correction if the residual is smaller then; start again if it halves."""
        self._start(system.times(self.values + self.correction), CORRECT)

    def _start(self, given: Tensor, stage: tl.constexpr) -> None:
        metric = self._metric
        cg_start(
            given,
            (metric.masses, metric.total, self._near.metric.masses),
            self._position,
            self._kept,
            self._vectors,
            self._numbers,
            self._packed,
            (self._limits.tolerance, AIM, self._limits.iterations),
            stage,
            constants=metric.constants,
        )
