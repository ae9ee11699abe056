"""Shuffled linear regression as entropic optimal transport: L(W) = OT_epsilon(X W, Y)."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import otdd_flash as otdd

CHANNELS = 5
NOISE, DEGREES_OF_FREEDOM = 0.05, 3
# Iterations after which a solve is asked whether a step goes too far.
STAGES = 30, 100, 300
# What two losses nearby are compared up to, relative: of solves in double precision, and others.
# Between steps of 1e-4 those of 40,000 cells scatter by half of the latter.
ROUNDINGS = 1e-7, 1e-5
# Times the last step, up to which a potential is extrapolated.
FARTHEST = 2.0
DATA_SEED, FIRST_START_SEED = 0, 1


def measured_cells(path: Path) -> Tensor:
    """The array `cells` (n, 5) of an npz file."""
    with np.load(path) as held:
        return torch.from_numpy(np.asarray(held["cells"]))


def synthetic_cells(count: int) -> Tensor:
    """Independent entries of Student's t distribution, (count, 5)."""
    draw = torch.Generator().manual_seed(DATA_SEED)
    normal = torch.randn(count, CHANNELS, generator=draw, dtype=torch.float64)
    of_freedom = torch.randn(
        count, CHANNELS, DEGREES_OF_FREEDOM, generator=draw, dtype=torch.float64
    )
    return normal / of_freedom.square().mean(-1).sqrt()


def weights(draw: torch.Generator) -> Tensor:
    """Independent normal entries of variance 1/5, float64 (5, 5)."""
    drawn = torch.randn(CHANNELS, CHANNELS, generator=draw, dtype=torch.float64)
    return drawn / math.sqrt(CHANNELS)


def start(seed: int) -> Tensor:
    """The weights that a descent starts from."""
    return weights(torch.Generator().manual_seed(FIRST_START_SEED + seed))


@dataclass(frozen=True, eq=False)
class Data:
    """Two clouds whose rows belong together in an order that is not known.

    Attributes:
        x: cells (n, 5), channels centred and of variance 1.
        y: rows of x W* + noise, shuffled.
        truth: W* (5, 5), float64.
    """

    x: Tensor
    y: Tensor
    truth: Tensor

    @classmethod
    def of(cls, cells: Tensor, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Data:
        """The clouds of these cells; W*, noise and order are always the same draws."""
        draw = torch.Generator().manual_seed(DATA_SEED)
        x = cells.double()
        x = (x - x.mean(0)) / x.std(0, correction=0)
        truth = weights(draw)
        y = x @ truth + NOISE * torch.randn(x.shape, generator=draw, dtype=torch.float64)
        y = y[torch.randperm(len(y), generator=draw)]
        return cls(x.to(device, dtype), y.to(device, dtype), truth)

    def off(self, w: Tensor) -> float:
        """|W - W*|_F / |W*|_F."""
        return float((w - self.truth).norm() / self.truth.norm())


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The Hessian of L by W at some weights.

    Attributes:
        values: its eigenvalues (25,), ascending, float64.
        vectors: its eigenvectors, columns of (25, 25).
        iterations: of conjugate gradients, the most of any direction.
        residual: of the linear systems, the largest of any direction.
        seconds: that it took.
    """

    values: Tensor
    vectors: Tensor
    iterations: int
    residual: float
    seconds: float

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue."""
        return float(self.values[0])

    def newton_direction(self, gradient: Tensor) -> Tensor:
        """-H^-1 gradient, in the gradient's shape."""
        along = self.vectors.T @ gradient.flatten() / self.values
        return -(self.vectors @ along).reshape(gradient.shape)


class Point:
    """Loss and derivatives at some weights, in float64 on the host.

    Attributes:
        w: the weights (5, 5).
        loss: L(w).
        gradient: of L by w (5, 5).
        potential: g of the solve (n,), on the device.
    """

    def __init__(
        self, w: Tensor, x: Tensor, hessian: otdd.SinkhornHessian, near: Point | None
    ) -> None:
        self._x, self._hessian = x, hessian
        self.w, self.loss = w, hessian.value
        self.gradient = (x.T @ hessian.gradient).cpu().double()
        self.potential = hessian.divergence.xy.g
        self._last_step = None if near is None else w - near.w
        self._last_change = None if near is None else self.potential - near.potential

    @property
    def gradient_norm(self) -> float:
        """Of Frobenius."""
        return float(self.gradient.norm())

    @property
    def lower_bound(self) -> float:
        """Of the loss."""
        return self._hessian.divergence.bounds[0]

    @property
    def converged(self) -> bool:
        """Whether the solve reached its tolerance."""
        return self._hessian.divergence.converged

    @property
    def marginal_error(self) -> float:
        """Of the solve."""
        return self._hessian.divergence.marginal_error

    def potential_at(self, w: Tensor) -> Tensor:
        """A guess of g at other weights: it goes on changing as it did on the last step.

        g + t (g - g_before), where t is how far the new step goes along the last one, in units of
        that one.
        """
        if self._last_step is None or self._last_change is None:
            return self.potential
        along = ((w - self.w) * self._last_step).sum() / self._last_step.square().sum()
        return self.potential + float(along.clamp(-FARTHEST, FARTHEST)) * self._last_change

    def hessian(self) -> tuple[Tensor, otdd.HessianProduct]:
        """H (25, 25) by the entries of w, row by row, and the product that it is made of.

        All 25 directions X E_k share the passes of one product.
        """
        size = self.w.numel()
        units = torch.eye(size).reshape(size, *self.w.shape).to(self._x)
        product = self._hessian.product(torch.einsum("ni,kij->knj", self._x, units))
        rows = torch.einsum("ni,knj->kij", self._x, product.values)
        return rows.reshape(size, size).cpu().double(), product

    def spectrum(self) -> Spectrum:
        """Eigenvalues and eigenvectors of the Hessian, which is symmetric but for rounding."""
        started = time.perf_counter()
        hessian, product = self.hessian()
        values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2)
        seconds = time.perf_counter() - started
        iterations, residual = int(product.iterations.max()), float(product.residual.max())
        return Spectrum(values, vectors, iterations, residual, seconds)


@dataclass(frozen=True)
class Loss:
    """L of some data, with what solves it.

    Attributes:
        data: both clouds.
        epsilon: regularisation, in units of the cost |.|^2.
        options: when a solve ends.
        cg: when the linear systems of the Hessian are solved.
        compute: where passes run.
    """

    data: Data
    epsilon: float
    options: otdd.Converged
    cg: otdd.CGOptions
    compute: otdd.ComputeOptions

    @property
    def rounding(self) -> float:
        """What losses are compared up to, relative."""
        return ROUNDINGS[self.compute.precision != "double"]

    def at(self, w: Tensor, near: Point | None = None, tolerance: float | None = None) -> Point:
        """The point at w; a solve starts from what a point nearby says of its potential.

        It ends at a tolerance, that of the options for None.

        Where rounding alone exceeds the tolerance, the solve goes as far as rounding allows.

        Raises:
            InputError: w is so large that rounding allows next to nothing.
        """
        options = self.options
        if tolerance is not None:
            options = replace(options, tolerance=tolerance)
        return self._ended(w, near, options, None if near is None else near.potential_at(w))

    def at_most(self, limit: float, w: Tensor, near: Point) -> Point | None:
        """The point at w, or None where the loss exceeds a limit.

        Far away a solve takes long, and there is nothing to be had: it ends as soon as its lower
        bound is above the limit.
        """
        options, guess = replace(self.options, tolerance=None), near.potential_at(w)
        for stage in STAGES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", otdd.NotConvergedWarning)
                try:
                    found = self._at(w, near, replace(options, max_iterations=stage), guess)
                except otdd.InputError:  # So far that float32 cannot solve it.
                    return None
            if found.lower_bound > limit:
                return None
            guess = found.potential
            if found.converged:
                break
        found = self._ended(w, near, self.options, guess)
        return found if found.loss <= limit else None

    def _ended(
        self, w: Tensor, near: Point | None, options: otdd.Converged, guess: Tensor | None
    ) -> Point:
        try:
            return self._at(w, near, options, guess)
        except otdd.InputError:
            return self._at(w, near, replace(options, tolerance=None), guess)

    def _at(
        self, w: Tensor, near: Point | None, options: otdd.Converged, guess: Tensor | None
    ) -> Point:
        hessian = otdd.sinkhorn_hessian(
            self.data.x @ w.to(self.data.x),
            self.data.y,
            epsilon=self.epsilon,
            lambda_x=1.0,
            debias=False,
            start=None if guess is None else {"xy": guess},
            options=options,
            cg=self.cg,
            compute=self.compute,
        )
        return Point(w, self.data.x, hessian, near)
