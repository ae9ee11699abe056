"""How others balance many small matrices: rows, then columns, a fixed number of times.

Each takes logits (B, n, n) and returns matrices (B, n, n). Packages are imported where they are
installed; what they add to sums is set to 0 where they let one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd

Run = Callable[[Tensor], Tensor]


def runs(iterations: int, n: int, device: str) -> dict[str, Run]:
    """Ours, and of the others those that are installed and run on the device."""
    plain = partial(loop, iterations=iterations)
    found: dict[str, Run] = {
        "ours": partial(otdd.doubly_stochastic, iterations=iterations),
        "ours, implicit": partial(
            otdd.doubly_stochastic, iterations=iterations, gradient="implicit"
        ),
        "loop": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
    }
    if device == "cuda" and n == 4 and find_spec("liger_kernel"):
        found["liger-kernel"] = partial(liger, iterations=iterations)
    for package, name, run in (
        ("ot", "POT", pot),
        ("ott", "OTT-JAX", ott),
        ("geomloss", "geomloss", geomloss),
        ("pygmtools", "pygmtools", pygmtools),
    ):
        if find_spec(package) and not (
            package == "ott" and device == "cuda" and not _jax_has_gpu()
        ):
            found[name] = partial(run, iterations=iterations)
    return found


def loop(logits: Tensor, iterations: int) -> Tensor:
    """As layers write it, of matrices whose exponentials neither overflow nor are lost."""
    balanced = (logits - logits.amax((-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        balanced = balanced / balanced.sum(-1, keepdim=True)
        balanced = balanced / balanced.sum(-2, keepdim=True)
    return balanced


class Liger(torch.autograd.Function):
    """The kernels of liger-kernel's mHC layer, whose other coefficients are of zeros."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        """Balanced matrices; mixing coefficients are laid out as [pre, post, matrix]."""
        from liger_kernel.ops.mhc import mhc_split_sinkhorn_fwd

        n = logits.shape[-1]
        mix = logits.new_zeros((len(logits), n * n + 2 * n))
        mix[:, 2 * n :] = logits.flatten(1)
        ctx.given = mix, mix.new_zeros(mix.shape[1]), mix.new_ones(())
        ctx.iterations = iterations
        mix, offsets, one = ctx.given
        balanced: Tensor = mhc_split_sinkhorn_fwd(
            mix, offsets, one, one, one,
            tmax=iterations, pre_eps=0.0, sinkhorn_eps=0.0, post_mult=1.0,
        )[2]  # fmt: skip
        return balanced

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None]:
        """By logits."""
        from liger_kernel.ops.mhc import mhc_sinkhorn_bwd

        mix, offsets, one = ctx.given
        gradient: Tensor = mhc_sinkhorn_bwd(
            mix, offsets, one, cotangents.contiguous(), tmax=ctx.iterations, sinkhorn_eps=0.0
        )
        return gradient, None


def liger(logits: Tensor, iterations: int) -> Tensor:
    """Liger-kernel 0.8's mHC kernels, and the copy to the layout that they read."""
    balanced: Tensor = Liger.apply(logits, iterations)
    return balanced


def pot(logits: Tensor, iterations: int) -> Tensor:
    """POT's `ot.batch`, in the log domain."""
    from ot.batch import bregman_log_projection_batch

    ones = logits.new_ones(logits.shape[:2])
    found: Tensor = bregman_log_projection_batch(
        logits, ones, ones, max_iter=iterations, tol=0, grad="autodiff"
    )["T"]
    return found


def geomloss(logits: Tensor, iterations: int) -> Tensor:
    """Geomloss' batch of matrices: symmetric steps, so not these iterations but their limit."""
    from geomloss.ot import solve_batch

    found: Tensor = solve_batch(-logits, reg=1.0, max_iter=iterations).plan
    return logits.shape[-1] * found


def pygmtools(logits: Tensor, iterations: int) -> Tensor:
    """Pygmtools' Sinkhorn, whose iterations are half as much and in the log domain."""
    import pygmtools

    found: Tensor = pygmtools.sinkhorn(
        logits, max_iter=2 * iterations, tau=1.0, batched_operation=True, backend="pytorch"
    )
    return found


def ott(logits: Tensor, iterations: int) -> Tensor:
    """OTT-JAX, vmapped and jitted; columns first there, so of transposed matrices."""
    import jax

    balanced = _ott_of(iterations)(jax.dlpack.from_dlpack(logits.detach().mT.contiguous()))
    found: Tensor = torch.utils.dlpack.from_dlpack(jax.block_until_ready(balanced))
    return found.mT


@cache
def _ott_of(iterations: int) -> Any:
    import jax
    from ott.geometry.geometry import Geometry
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn

    solver = Sinkhorn(
        threshold=-1.0, max_iterations=iterations, min_iterations=iterations,
        inner_iterations=iterations,
    )  # fmt: skip

    def one(logits: Any) -> Any:
        masses = jax.numpy.ones(logits.shape[0])
        return solver(LinearProblem(Geometry(-logits, epsilon=1.0), a=masses, b=masses)).matrix

    return jax.jit(jax.vmap(one))


@cache
def _jax_has_gpu() -> bool:
    import jax

    return any(device.platform == "gpu" for device in jax.devices())


def exact(logits: Tensor, iterations: int) -> Tensor:
    """The loop in the log domain and in float64."""
    x = logits.double()
    for _ in range(iterations):
        x = x - x.logsumexp(-1, keepdim=True)
        x = x - x.logsumexp(-2, keepdim=True)
    return x.exp()


def gradient_of(run: Run) -> Run:
    """Forward and backward of a run, with cotangents like the logits."""

    def both(logits: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf, logits)[0]

    return both


def error(run: Run, logits: Tensor, iterations: int) -> float:
    """The largest relative error, in units of 2^-24 times 1 and the range of the logits."""
    truth = exact(logits, iterations)
    spread = (logits.amax((1, 2)) - logits.amin((1, 2))).double()
    off = ((run(logits).detach().double() - truth).abs() / truth).amax((1, 2))
    return _number((off * 2**24 / (1 + spread)).max())


def gradient_error(run: Run, logits: Tensor, iterations: int) -> float:
    """The largest error of a gradient, in units of 2^-24 times the largest entry."""
    truth = gradient_of(partial(exact, iterations=iterations))(logits.double())
    off = (gradient_of(run)(logits).double() - truth).abs().max()
    return _number(off * 2**24 / truth.abs().max())


def _number(value: Tensor) -> float:
    return math.inf if bool(value.isnan()) else float(value)
