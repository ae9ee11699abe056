"""The backward pass of many small balanced matrices, implicit and unrolled.

    python -m experiments.bench_adjoint [--device cpu] [--sizes N ...] [--entries E]

B matrices n x n of logits uniform in (0, 4), balanced by 100 iterations, normal cotangents. At
n = 16 there are 65,536 of them, after the post "Sinkhorn gradients without reversing the forward
pass", and at other sizes B n^2 = 2^24; `--entries` sets another number. Backward milliseconds:

- ours: `plan_gradient`, on a GPU its kernel; `graph` from a CUDA graph, without launching;
- torch: the same conjugate gradients as PyTorch operations;
- autograd: 100 iterations unrolled, in the linear domain, and what their forward pass keeps;
- compiled: the same by `torch.compile`;
- unrolled: `doubly_stochastic` with gradient="unrolled", where it is there;
- liger_kernel: that of liger-kernel's mHC layer, of 4 x 4 matrices, unrolled;
- ott_jax: `ImplicitDiff` of OTT-JAX, vmapped, forward and backward as they come together;
- jaxopt: `custom_fixed_point` around 100 iterations of column scalings, vmapped, likewise together.

Errors are means and maxima over entries, against autograd through 100 iterations in float64 of up
to 256 of the matrices; one that is off by more than 1e-3 is not timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import otdd_flash as otdd
from experiments.batched_peers import liger
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import extra_mib, graphed, milliseconds
from otdd_flash.batched.adjoint import plan_gradient

SIZES, ENTRIES, POSTED = (4, 8, 16, 32, 64, 128), 1 << 24, (16, 65_536)
ITERATIONS, RANGE, COMPARED, WORST = 100, 4.0, 256, 1e-3
METHODS = (
    "ours", "torch", "autograd", "compiled", "unrolled", "liger_kernel", "ott_jax", "jaxopt"
)  # fmt: skip
# Seconds of a call that is timed less often.
SLOW = 0.2

# A call that finds the gradient of matrices by their logits.
Backward = Callable[[], Tensor]


def balanced(logits: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Rows, then columns, sum to 1 after every iteration."""
    found = (logits - logits.amax((1, 2), keepdim=True)).exp()
    for _ in range(iterations):
        found = found / found.sum(2, keepdim=True)
        found = found / found.sum(1, keepdim=True)
    return found


class Work:
    """Matrices with cotangents, and the truth for some of them."""

    def __init__(self, n: int, count: int, device: str) -> None:
        draw = torch.Generator(device).manual_seed(n)
        options: dict[str, Any] = {"generator": draw, "device": device}
        self.logits = RANGE * torch.rand(count, n, n, **options)
        self.cotangents = torch.randn(count, n, n, **options)
        # In parts, whose steps fit memory.
        self.plans = torch.cat([balanced(part) for part in torch.split(self.logits, 1 << 16)])
        some = self.logits[:COMPARED].double().requires_grad_()
        result = (balanced(some) * self.cotangents[:COMPARED]).sum()
        (self.truth,) = torch.autograd.grad(result, some)

    def ours(self) -> Backward:
        """By the kernel."""
        return lambda: plan_gradient(self.plans, self.cotangents, in_triton=self.plans.is_cuda)

    def torch(self) -> Backward:
        """By PyTorch's operations."""
        return lambda: plan_gradient(self.plans, self.cotangents, in_triton=False)

    def autograd(self, call: Callable[[Tensor], Tensor] = balanced) -> Backward:
        """Through the iterations, whose forward pass is not timed."""
        leaf = self.logits.clone().requires_grad_()
        result = call(leaf)
        return lambda: torch.autograd.grad(result, leaf, self.cotangents, retain_graph=True)[0]

    def compiled(self) -> Backward:
        """Likewise, compiled, with a backward pass that can be called again."""
        settings: Any = import_module("torch._functorch.config")
        settings.donated_buffer = False
        return self.autograd(torch.compile(balanced))

    def unrolled(self) -> Backward:
        """By this package's own unrolled kernel."""
        layer: Any = getattr(otdd, "doubly_stochastic", None)
        if layer is None:
            raise NotImplementedError("otdd_flash.doubly_stochastic is not there")
        return self.autograd(lambda logits: layer(logits, iterations=ITERATIONS))

    def liger_kernel(self) -> Backward:
        """By liger-kernel, whose matrices are 4 x 4."""
        if self.logits.shape[1] != 4:
            raise NotImplementedError("matrices are 4 x 4")
        return self.autograd(lambda logits: liger(logits, ITERATIONS))

    def ott_jax(self) -> Backward:
        """OTT-JAX, which finds plan and gradient together."""
        from ott.geometry import geometry
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import implicit_differentiation, sinkhorn

        n = self.logits.shape[1]
        solver = sinkhorn.Sinkhorn(
            threshold=1e-6,
            max_iterations=ITERATIONS,
            implicit_diff=implicit_differentiation.ImplicitDiff(),
        )

        def loss(logits: Any, cotangent: Any) -> Any:
            problem = linear_problem.LinearProblem(geometry.Geometry(-logits, epsilon=1.0))
            return n * (solver(problem).matrix * cotangent).sum()

        return self._of_jax(loss)

    def jaxopt(self) -> Backward:
        """Jaxopt, which finds them together too; a fixed point are the scalings of columns."""
        import jax
        from jaxopt.implicit_diff import custom_fixed_point

        log_sums, n = jax.nn.logsumexp, self.logits.shape[1]

        def scaled(g: Any, logits: Any) -> Any:
            rows = -log_sums(logits + g[None, :], axis=1)
            columns = -log_sums(logits + rows[:, None], axis=0)
            # Constants are no part of it, or nothing would tell which of them to solve for.
            return columns - columns.mean()

        @custom_fixed_point(scaled)  # type: ignore[untyped-decorator]
        def solve(start: Any, logits: Any) -> Any:
            return jax.lax.fori_loop(0, ITERATIONS, lambda _, g: scaled(g, logits), start)

        def loss(logits: Any, cotangent: Any) -> Any:
            g = solve(jax.numpy.zeros(n), logits)
            rows = -log_sums(logits + g[None, :], axis=1)
            return (jax.numpy.exp(logits + rows[:, None] + g[None, :]) * cotangent).sum()

        return self._of_jax(loss)

    def _of_jax(self, loss: Callable[[Any, Any], Any]) -> Backward:
        """The gradient of a function of logits and cotangent of one matrix."""
        import jax

        gradient = jax.jit(jax.vmap(jax.grad(loss)))
        given = [jax.numpy.asarray(part.cpu().numpy()) for part in (self.logits, self.cotangents)]
        return lambda: from_dlpack(gradient(*given).block_until_ready())


def timed(call: Backward, device: str) -> float:
    """Median milliseconds."""
    if device == "cuda":
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        slow = time.perf_counter() - started > SLOW
        return milliseconds(call, repeats=3, warm_ups=0) if slow else milliseconds(call)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def measured(work: Work, name: str, device: str) -> dict[str, Any]:
    """Errors, time and memory of one method."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        call: Backward = getattr(work, name)()
        kept = torch.cuda.memory_allocated() - before if device == "cuda" else 0
        error = (call()[:COMPARED].to(work.truth) - work.truth).abs()
        entry: dict[str, Any] = {"error": float(error.max()), "mean_error": float(error.mean())}
        if entry["error"] <= WORST:
            entry["ms"] = timed(call, device)
            if device == "cuda":
                entry |= {"extra_mib": extra_mib(call), "kept_mib": kept / 2**20}
                if name == "ours":
                    entry["graph_ms"] = graphed(call)
    # A peer may fail in any way, and the other entries are still wanted.
    except Exception as failure:
        entry = {"failed": f"{type(failure).__name__}: {str(failure)[:200]}"}
    return entry


def bench(n: int, count: int, device: str, names: Sequence[str]) -> dict[str, Any]:
    """One row."""
    work, row = Work(n, count, device), {"n": n, "matrices": count, "device": device}
    for name in names:
        row[name] = measured(work, name, device)
        # What it kept.
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return row


def main() -> None:
    """Write bench_adjoint_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--entries", type=int, help="B n^2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows that are there")
    given = parser.parse_args()
    rows = Rows(
        f"bench_adjoint_{given.device}",
        ("n", "matrices"),
        *("torch", "triton", "liger-kernel", "ott-jax", "jaxopt", "jax"),
        folder=given.output,
        again=given.again,
    )
    for n in given.sizes:
        count = (given.entries or ENTRIES) // n**2
        if n == POSTED[0] and given.entries is None:
            count = POSTED[1]
        if not rows.has(n=n, matrices=count):
            rows.add(bench(n, count, given.device, given.methods))


if __name__ == "__main__":
    main()
