"""Sinkhorn attention beside the loop over stored scores, that loop compiled, and softmax attention.

    python -m experiments.bench_attention --device cuda [--sizes N ...] [--iterations T ...]
    python -m experiments.bench_attention --device cuda --variants [--sizes N ...]

32 heads of d = 64 in float16, n = m; forward, and with the backward pass. Of each setting the error
of the last head against float64 is taken first, and what is off is not timed. A row is written as
soon as it is measured; those that are there are kept. `--variants` times every kind of pass with
several blocks of its kernel (rows, columns, warps, stages), for `kernels/attention.py`.
`--device cpu` takes few and small heads, to see that the script runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import milliseconds
from otdd_flash.attention.passes import Scores

SIZES = {"cuda": (65_536, 32_768, 16_384, 8192, 4096, 2048, 1024), "cpu": (512, 128)}
HEADS, WIDTH = {"cuda": 32, "cpu": 4}, 64
KEYS = ("method", "n", "iterations", "backward")
# Of outputs and gradients, as a norm over a norm: ours, and others', whose scores are float16.
ALLOWED, ALLOWED_TO_OTHERS = 5e-3, 5e-2
# The largest n whose first head is computed in float64, and up to which others store scores.
MOST_CHECKED, MOST_STORED = 16_384, 16_384
VARIANTS = (
    *((64, 128, 4, 3), (64, 128, 4, 2), (64, 128, 4, 4), (64, 256, 4, 2), (64, 256, 8, 2)),
    *((128, 128, 4, 2), (128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3)),
    *((128, 32, 4, 3), (128, 32, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def loop(q: Tensor, k: Tensor, v: Tensor, iterations: int) -> Tensor:
    """Store the scores and balance them, as one writes it in PyTorch; n = m."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    rows = -scores.logsumexp(-1, keepdim=True)
    columns = torch.zeros_like(scores[..., :1, :])
    for _ in range(iterations):
        columns = -(scores + rows).logsumexp(-2, keepdim=True)
        rows = -(scores + columns).logsumexp(-1, keepdim=True)
    out: Tensor = (scores + rows + columns).exp() @ v
    return out


def methods(n: int, iterations: int) -> Iterator[tuple[str, Run]]:
    """Ours, then others by their names."""
    yield "ours", lambda q, k, v: otdd.sinkhorn_attention(q, k, v, iterations=iterations)
    if iterations == 0:
        yield "scaled_dot_product_attention", scaled_dot_product_attention
    if n <= MOST_STORED:
        compiled: Any = torch.compile(loop, dynamic=False)
        yield "compiled loop", lambda q, k, v: compiled(q, k, v, iterations)
        yield "loop", lambda q, k, v: loop(q, k, v, iterations)


def step(run: Run, points: list[Tensor], cotangent: Tensor, backward: bool) -> list[Tensor]:
    """The output, or the gradients by q, k and v."""
    if not backward:
        with torch.no_grad():
            return [run(*points)]
    leaves = [each.detach().requires_grad_() for each in points]
    return list(torch.autograd.grad(run(*leaves), leaves, cotangent))


def error(run: Run, points: list[Tensor], cotangent: Tensor, iterations: int, back: bool) -> float:
    """The largest relative error of output or gradients, of one head, against float64."""
    exact_of = otdd.ComputeOptions(points[0].device.type, backend="torch", precision="double")

    def exact(*given: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(*given, iterations=iterations, compute=exact_of)

    # The last head of all that are timed.
    found = step(run, points, cotangent, back)
    doubles = [each[:, -1:].double() for each in points], cotangent[:, -1:].double()
    pairs = zip(found, step(exact, *doubles, back), strict=True)
    return max(float((one[:, -1:].double() - true).norm() / true.norm()) for one, true in pairs)


def timed(run: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds, and on a GPU the peak of what is allocated above what was there."""
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        return {"ms": milliseconds(run, warm_ups=1), "peak_MiB": peak}
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times[1:])}


def drawn(device: str, n: int) -> list[Tensor]:
    """q, k, v and a cotangent (1, heads, n, d), in float16, on a processor in float32."""
    draw = torch.Generator(device).manual_seed(n)
    dtype = torch.float16 if device == "cuda" else torch.float32
    shape = 1, HEADS[device], n, WIDTH
    return [torch.randn(shape, generator=draw, device=device).to(dtype) for _ in range(4)]


def measured(
    run: Run, given: list[Tensor], iterations: int, backward: bool, device: str, allowed: float
) -> dict[str, Any]:
    """Error and times of a method, or why there are none."""
    *points, cotangent = given
    row: dict[str, Any] = {}
    try:
        if cotangent.shape[2] <= MOST_CHECKED:
            row["error"] = error(run, points, cotangent, iterations, backward)
            if not row["error"] <= allowed:
                return {**row, "wrong": True}
        return row | timed(lambda: step(run, points, cotangent, backward), device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {**row, "failed": "out of memory"}


def bench(arguments: argparse.Namespace) -> None:
    """Time all settings that have no row yet."""
    device = arguments.device
    rows = Rows(f"bench_attention_{device}", KEYS, "torch", "triton", folder=arguments.output)
    rows.head |= {"heads": HEADS[device], "d": WIDTH}
    for n in arguments.sizes or SIZES[device]:
        given = drawn(device, n)
        for backward in (False, True):
            for iterations in arguments.iterations:
                for method, run in methods(n, iterations):
                    keys = {"n": n, "iterations": iterations, "backward": backward}
                    if rows.has(method=method, **keys):
                        continue
                    if method == "loop" and iterations == 0:
                        continue
                    torch.compiler.reset()
                    allowed = ALLOWED if method == "ours" else ALLOWED_TO_OTHERS
                    row = measured(run, given, iterations, backward, device, allowed)
                    rows.add({"method": method, **keys, **row})


def passes(given: list[Tensor], in_triton: bool) -> dict[str, Callable[[], object]]:
    """A pass of every kind by the name of its blocks."""
    q, k, v, cotangent = (each[0].contiguous() for each in given)
    counts = torch.full((len(q),), 3, dtype=torch.int32, device=q.device)
    scores = Scores(q, k, WIDTH**-0.5, counts, in_triton)
    us, vs = scores.vector(4).zero_(), scores.transposed.vector(4).zero_()
    scores.half_step(vs[0], torch.zeros_like(us[0]), 0, us[0])
    us[1:] = us[0]
    x, y, one = torch.randn_like(us), torch.randn_like(vs), us.new_ones(len(q))
    lasts = us[-1], vs[-1]
    zero, out, by_v, found = us.new_zeros(us.shape[1:]), torch.empty_like(v), v.clone(), vs[0] + 0
    return {
        "vector by a guess": lambda: scores.half_step(vs[0], zero, 0, us[0].clone(), us[1]),
        "gradient": lambda: scores.gradient(
            *((cotangent, v), (us, vs), scores.earlier((us, vs), lasts, (x, y)), (x[0], y[0]), out)
        ),
        "vector of a plan": lambda: scores.plan_product((us[0], vs[0]), y[0], one, 0, x[0].clone()),
        "output": lambda: scores.half_step(vs[0], zero, 0, us[0].clone(), None, v, out),
        "product": lambda: scores.transposed.plan_product(
            (vs[0], us[0]), x[0], one, 0, found, (cotangent, v, by_v)
        ),
        "vector": lambda: scores.half_step(vs[0], zero, 0, us[0].clone()),
    }


def try_variants(arguments: argparse.Namespace) -> None:
    """Time every kind of pass, of three iterations, with blocks of its kernel."""
    from otdd_flash.kernels import attention

    device, chosen = arguments.device, attention.blocks_for
    keys = ("pass", "n", "blocks")
    rows = Rows(f"attention_blocks_{device}", keys, "torch", "triton", folder=arguments.output)
    for n in arguments.sizes or (8192,):
        given = drawn(device, n)
        for name, run in passes(given, in_triton=device == "cuda").items():
            for variant in (None, *VARIANTS):
                blocks = list(variant or ())
                if rows.has(**{"pass": name, "n": n, "blocks": blocks}):
                    continue
                fixed = chosen if variant is None else lambda *_, v=variant: attention.Blocks(*v)
                row: dict[str, Any] = {"pass": name, "n": n, "blocks": blocks}
                try:
                    with mock.patch.object(attention, "blocks_for", fixed):
                        row |= timed(run, device)
                except Exception as reason:  # Out of shared memory or registers: the next one.
                    row["failed"] = f"{type(reason).__name__}: {reason}"[:200]
                rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--iterations", type=int, nargs="+", default=[0, 1, 3, 10])
    parser.add_argument("--variants", action="store_true", help="try blocks of kernels")
    parser.add_argument("--output", default=RESULTS, help="folder of the result")
    arguments = parser.parse_args()
    arguments.output = type(RESULTS)(arguments.output)
    (try_variants if arguments.variants else bench)(arguments)


if __name__ == "__main__":
    main()
