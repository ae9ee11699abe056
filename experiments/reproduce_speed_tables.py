"""Speed of OT_epsilon over sizes and dimensions: the shape of FlashSinkhorn's Tables 3, 7 to 12.

    python -m experiments.reproduce_speed_tables [--output DIR] [--again]

n = m unlabelled Gaussian points on a GPU, the cost ||x - y||^2 / 2, epsilon a hundredth of its
mean, ten iterations at it from zero potentials, no debiasing (Ye et al. 2026, arXiv:2602.03067).
Forward is the value, the gradient is by x. Whole calls, medians of ten by CUDA events.

- ours: with packing, and with a certificate of two half-passes in `high` precision. Where float32
  has no more to gain before the tenth iteration it stops there, as half_passes tell.
- flash_sinkhorn_symmetric: a first and a last full update beside ten averaged ones.
- flash_sinkhorn_alternating: ten times both potentials, as ours.
- geomloss: averaged updates, one per entry of its epsilon schedule, and a first and a last full
  one. The schedule is diameter^2, steps from there by factors scaling^2 while above blur^2, and
  blur^2. With blur^2 = epsilon, scaling = 1 - 1e-6 and a diameter 7.5 steps above blur it has ten
  entries, all of them epsilon to 2e-5. `online` needs KeOps.
- ott_jax: not run, as clock and memory counters here are PyTorch's; its row says what is missing.

A peer that does not run gets a row with the reason. Marginal errors are the larger of ||r - a||_1
and ||c - b||_1 of the plan that a peer ends with, by our operator in `high` precision; a ratio
counts only where ours is not larger. Half-passes are sweeps over n x m scores for one potential.

flash-sinkhorn's kernels are tuned over all their candidates at each size, but a candidate runs five
times where Triton would run it for 0.1 s, and candidates are compiled beforehand, one process per
size. Rows go to reproduce_speed_tables.json, tables of them to speed_tables.md.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bench_divergence import marginal_error, with_gradient
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import extra_mib, milliseconds
from otdd_flash import Converged, NotConvergedWarning, sinkhorn_loss
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.files.atomic import write_text
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.solving import solve

SIZES = tuple((n, d) for n in (50_000, 20_000, 5_000) for d in (1024, 512, 64))
ITERATIONS = 10
RELATIVE_EPSILON = 0.01
# What float32 allows at this epsilon; the certificate counts as one more iteration.
OPTIONS = Converged(tolerance=4e-5, max_iterations=ITERATIONS + 1)
# Final f and g, and half-passes.
Solved = tuple[Tensor, Tensor, float]


class Workload(NamedTuple):
    """Two clouds (n, d) and epsilon."""

    x: Tensor
    y: Tensor
    epsilon: float

    @classmethod
    def draw(cls, n: int, d: int, device: str = "cuda") -> Workload:
        """Standard normal points."""
        draw = torch.Generator(device).manual_seed(n + d)
        x, y = (torch.randn(n, d, generator=draw, device=device) for _ in range(2))
        squares = x.square().sum(1).mean() + y.square().sum(1).mean()
        return cls(x, y, RELATIVE_EPSILON * float(squares / 2 - x.mean(0) @ y.mean(0)))

    def problem(self, precision: str) -> Comparison:
        """The same for this package's solver."""
        compute = ComputeOptions(device=str(self.x.device), precision=precision)
        return Comparison.between(self.x, self.y, self.epsilon, compute=compute, debias=False)


class Peer(NamedTuple):
    """OT_epsilon of a workload by one package: as a function of x, and what it ends with."""

    value: Callable[[Tensor], Tensor]
    solve: Callable[[], Solved]


def ours(work: Workload) -> Peer:
    """This package."""
    start = {"xy": torch.zeros(len(work.y), device=work.y.device)}

    def solved() -> Solved:
        term = solve(work.problem("fast"), OPTIONS, start=start).xy
        return term.f, term.g, term.passes

    value = partial(
        sinkhorn_loss, y=work.y, epsilon=work.epsilon, debias=False, start=start, options=OPTIONS
    )
    return Peer(value, solved)


def flash_sinkhorn(work: Workload, backend: str) -> Peer:
    """flash-sinkhorn's symmetric or alternating solver."""
    from flash_sinkhorn import SamplesLoss

    fixed = {"use_epsilon_scaling": False, "eps": work.epsilon, "n_iters": ITERATIONS}
    loss = partial(SamplesLoss, backend=backend, half_cost=True, **fixed)
    iterations = ITERATIONS if backend == "alternating" else ITERATIONS + 2

    def solve() -> Solved:
        f, g = loss(potentials=True)(work.x, work.y)
        return f, g, 2 * iterations

    return Peer(lambda x: loss()(x, work.y), solve)


def geomloss(work: Workload, backend: str) -> Peer:
    """GeomLoss with a dense cost, or online with KeOps."""
    if backend == "online":
        import_module("pykeops.torch")
    from geomloss import SamplesLoss

    blur, scaling = work.epsilon**0.5, 1 - 1e-6
    # The schedule has both ends beside its steps.
    diameter = blur / scaling ** (ITERATIONS - 2.5)
    schedule = {"p": 2, "blur": blur, "diameter": diameter, "scaling": scaling}
    loss = partial(SamplesLoss, "sinkhorn", backend=backend, debias=False, **schedule)

    def solve() -> Solved:
        f, g = loss(potentials=True)(work.x, work.y)
        return f.detach().reshape(-1), g.detach().reshape(-1), 2 * (ITERATIONS + 2)

    return Peer(lambda x: loss()(x, work.y), solve)


def ott_jax(_: Workload) -> Peer:
    """No measurement, but the reason for it."""
    import_module("ott")
    raise NotImplementedError("runs outside PyTorch, whose clock and memory counters are read here")


FLASH: dict[str, Callable[[Workload], Peer]] = {
    "flash_sinkhorn_symmetric": partial(flash_sinkhorn, backend="symmetric"),
    "flash_sinkhorn_alternating": partial(flash_sinkhorn, backend="alternating"),
}
PEERS: dict[str, Callable[[Workload], Peer]] = {
    "ours": ours,
    **FLASH,
    "geomloss_tensorized": partial(geomloss, backend="tensorized"),
    "geomloss_online": partial(geomloss, backend="online"),
    "ott_jax": ott_jax,
}


def bench(n: int, d: int, names: Iterable[str], rows: Rows) -> None:
    """Add the rows of some peers at one size, ours first."""
    work = Workload.draw(n, d)
    exact = work.problem("high").operator("xy")
    for name in names:
        row = {"n": n, "d": d, "peer": name, "epsilon": work.epsilon, **measure(name, work, exact)}
        # A failed peer leaves memory behind, geomloss's all gradients switched off.
        torch.set_grad_enabled(True)
        gc.collect()
        torch.cuda.empty_cache()
        if name != "ours":
            mine = {"n": n, "d": d, "peer": "ours"}.items()
            row |= compared(row, next(row for row in rows.rows if mine <= row.items()))
        rows.add(row)


def measure(name: str, work: Workload, exact: Operator) -> dict[str, Any]:
    """What a peer took and reached, and the reason if it did not get through."""
    times = "forward_ms", "forward_and_gradient_ms", "half_passes", "ms_per_half_pass"
    row: dict[str, Any] = dict.fromkeys((*times, "marginal_error", "value", "extra_mib", "reason"))
    try:
        peer = PEERS[name](work)
        f, g, half_passes = peer.solve()
        row["half_passes"] = half_passes
        row["marginal_error"] = marginal_error(exact, f, g, work.epsilon)
        forward = partial(peer.value, work.x)
        row["value"] = float(forward())
        row["forward_ms"] = timed(forward)
        row["ms_per_half_pass"] = row["forward_ms"] / half_passes
        row["extra_mib"] = extra_mib(forward)
        both = partial(with_gradient, peer.value, work.x.clone().requires_grad_())
        row["forward_and_gradient_ms"] = timed(both)
    except Exception as error:
        # A peer may fail in any way; we may not.
        if name == "ours":
            raise
        row["reason"] = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
    return row


def timed(run: Callable[[], object]) -> float:
    """Median milliseconds of ten runs, after fewer warm-up runs where one takes over a second."""
    run()
    slow = milliseconds(run, repeats=1, warm_ups=0) > 1000
    return milliseconds(run, warm_ups=0 if slow else 2)


def compared(row: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """Their times over ours, where we are as accurate."""
    error = row["marginal_error"]
    counts = error is not None and mine["marginal_error"] <= error
    ratios: dict[str, Any] = {"ratio_counts": counts}
    for name, key in (("ratio", "forward_ms"), ("gradient_ratio", "forward_and_gradient_ms")):
        ratios[name] = row[key] / mine[key] if counts and row[key] is not None else None
    return ratios


def tune_by(*, repeats: int, warm_ups: int) -> None:
    """Let Triton's tuner run a candidate this often; one that cannot run says so in its first."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = staticmethod(
        lambda run, **_: milliseconds(run, repeats=repeats, warm_ups=warm_ups)
    )


def compile_candidates(n: int, d: int) -> None:
    """Run each candidate of flash-sinkhorn's tuner once, which leaves it in Triton's cache."""
    tune_by(repeats=1, warm_ups=0)
    work = Workload.draw(n, d)
    for make in FLASH.values():
        with_gradient(make(work).value, work.x.clone().requires_grad_())


def compile_ahead(sizes: Iterable[tuple[int, int]]) -> None:
    """The same for many sizes at once; a failure only means that compiling comes later."""
    code = "from experiments.reproduce_speed_tables import compile_candidates as c; c({}, {})"
    for child in [subprocess.Popen([sys.executable, "-c", code.format(*size)]) for size in sizes]:
        child.wait()


def tables(rows: Rows) -> str:
    """Markdown: times with ratios, errors, memory, and who did not run."""
    found = {(row["n"], row["d"], row["peer"]): row for row in rows.rows}
    environment = rows.head["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    parts = [
        "# OT_epsilon by size and dimension",
        f"{environment['gpu']}; {versions}. Ten iterations on n = m random points. In brackets: "
        "times ours, where our marginal error is not larger. Written by "
        "`python -m experiments.reproduce_speed_tables`, whose docstring says what was run.",
    ]
    for title, key, ratio in (
        ("Forward, milliseconds", "forward_ms", "ratio"),
        ("Forward and gradient by x, milliseconds", "forward_and_gradient_ms", "gradient_ratio"),
        ("Marginal error", "marginal_error", ""),
        ("Memory over the inputs, forward, MiB", "extra_mib", ""),
    ):
        lines = [f"| n | d | {' | '.join(PEERS)} |", "|---" * (2 + len(PEERS)) + "|"]
        for n, d in SIZES:
            cells = (cell(found.get((n, d, peer), {}), key, ratio) for peer in PEERS)
            lines.append(f"| {n:,} | {d} | {' | '.join(cells)} |")
        parts += [f"## {title}", "\n".join(lines)]
    failed: dict[str, list[str]] = {}
    for (n, d, peer), row in found.items():
        if row["reason"] is not None:
            failed.setdefault(f"- {peer}: {row['reason']}", []).append(f"{n:,} x {d}")
    parts += ["## What did not run"]
    parts += ["\n".join(f"{reason} ({', '.join(where)})" for reason, where in failed.items())]
    return "\n\n".join(parts) + "\n"


def cell(row: dict[str, Any], key: str, ratio: str) -> str:
    """A measured number, and how many times ours it is."""
    value, times = row.get(key), row.get(ratio)
    if value is None:
        return "–"
    text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return text if times is None else f"{text} ({times:.1f}x)"


def main() -> None:
    """Write reproduce_speed_tables.json and speed_tables.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", NotConvergedWarning)
    packages = "torch", "triton", "flash-sinkhorn", "geomloss", "pykeops", "ott-jax"
    options = {"folder": arguments.output, "again": arguments.again}
    rows = Rows("reproduce_speed_tables", ("n", "d", "peer"), *packages, **options)
    todo = {(n, d): [peer for peer in PEERS if not rows.has(n=n, d=d, peer=peer)] for n, d in SIZES}
    compile_ahead(size for size, names in todo.items() if FLASH.keys() & set(names))
    tune_by(repeats=3, warm_ups=2)
    for (n, d), names in todo.items():
        if names:
            bench(n, d, names, rows)
    write_text(arguments.output / "speed_tables.md", tables(rows))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
