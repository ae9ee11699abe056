"""Where the time of the half-step goes: the units' floors on a GPU, counted, against the clock.

    python -m experiments.profile_half_step [--output DIR] [--again]

60,000 x 60,000 labelled random points: the half-step, the symmetric step, and the plan applied to
a matrix of k = d columns, each with its small kernels. Ten calls in a row are timed by CUDA events,
medians of ten. A result that is off is not timed.

Counted from the kernels' docstrings, for each pair of points, half of them in a symmetric step: 2 d
operations of tensor cores, 2 (d + k) for the plan, and one exp2. Bytes of device memory: points and
matrices once. Bytes of the second-level cache: each tile of scores fetches its rows of x and of y,
the plan is written and read once. Floors are these over what the machine does in this process:
cuBLAS' float16 product of 8192 x 8192 random matrices (a few of them; a hundred in a row reach the
power limit, which stands beside it), 16 exp2 a cycle on each multiprocessor at the clock that
nvidia-smi reads while calls repeat, a copy of 2 GiB. Utilisation is a floor over the measured time;
the limiter has the highest. `padding` is what is computed beside the counted: blocks and classes
filled up, and d to the depth of a tile.

Rows named ncu: counters of the half-step's kernel by Nsight Compute, or why there are none.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments import bench_half_step as bench
from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.timing import cublas_tflops, milliseconds
from otdd_flash.cost.points import LabelledCost
from otdd_flash.kernels.passes.half_step import half_step_kernel
from otdd_flash.kernels.passes.plan_blocks import plan_block_kernel
from otdd_flash.kernels.passes.symmetric_step import symmetric_step_kernel
from otdd_flash.kernels.points.packed_points import arrange
from otdd_flash.kernels.tiling import BLOCK_ROWS, narrow_tile, tile_for
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.report.page import INK, SOURCE_COLOR, TARGET_COLOR, new_figure, save_picture

SAMPLES = 60_000
DIMENSIONS = (784, 512, 128, 64)
IN_A_ROW = 10
# Of row masses: the plan is rounded to float16.
PLAN_ACCURACY = 2e-3
EXP2_PER_CYCLE = 16
HALF, SINGLE = 2, 4  # bytes
KERNELS = {
    "half_step": half_step_kernel,
    "symmetric_step": symmetric_step_kernel,
    "plan_application": plan_block_kernel,
}
COLORS = {"tensor_cores": SOURCE_COLOR, "exp2": TARGET_COLOR, "device_memory": "#009E73"}
COUNTED_BY_NCU = (512, 64)
COUNTERS = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
    "lts__t_bytes.sum",
)
LONGEST_COUNTING = 120


class Counts(NamedTuple):
    """What a call has to do."""

    operations: float
    exponentials: float
    memory_bytes: float
    cache_bytes: float
    padding: float


def best_rates() -> dict[str, float]:
    """What the device does at best, in this process."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * SINGLE * len(source) / milliseconds(lambda: target.copy_(source)) / 1e9
    factor = torch.randn(8192, 8192, device="cuda").half()
    out = torch.empty_like(factor)
    taken = milliseconds(lambda: [torch.mm(factor, factor, out=out) for _ in range(100)])
    return {
        "cublas_float16_tflops": cublas_tflops(),
        "cublas_float16_tflops_back_to_back": 100 * 2 * 8192**3 / taken / 1e9,
        "copy_tb_per_s": copied,
    }


def count(name: str, operator: KernelOperator) -> Counts:
    """The docstring's numbers for one call."""
    points, d = operator.cost.points[0].shape
    n, m = (arrange(labels, bench.CLASSES).size for labels in operator.cost.labels)
    device = operator.a.device
    tile = narrow_tile(device) if name == "symmetric_step" else tile_for(d, device)
    depth = -(-d // tile.depth) * tile.depth
    pairs, computed = float(points) ** 2, float(n) * m
    coordinates, columns, plan = n + m, 0, 0.0
    if name == "symmetric_step":
        # Tiles on and above the diagonal, of the first cloud.
        pairs, computed, coordinates = (pairs + points) / 2, n * (n + BLOCK_ROWS) / 2, n
    if name == "plan_application":
        columns, plan = d, 2 * computed * HALF
    operations = 2 * pairs * (d + columns)
    fetched = computed * depth * HALF * (1 / BLOCK_ROWS + 1 / tile.columns)
    moved = coordinates * d * HALF + columns * (m * HALF + points * SINGLE)
    padding = 2 * computed * (depth + columns) / operations - 1
    return Counts(operations, pairs, moved, fetched + plan, padding)


def prepare(name: str, operator: KernelOperator) -> tuple[Callable[[], object], float]:
    """A call as the solver makes it after ten iterations, and its error over what is allowed."""
    epsilon, highest = bench.RELATIVE_EPSILON * operator.costs.mean, operator.costs.highest
    if name == "symmetric_step":
        operator = with_itself(operator)
        f = torch.zeros(operator.shape[0], device=operator.a.device)
        for _ in range(10):
            f = (f + operator.softmin_self(f, epsilon)) / 2
        step = partial(operator.softmin_self, f, epsilon)
        return step, off(step(), operator.softmin_rows(f, epsilon)) / highest / bench.ACCURACY
    f, g = bench.Ours(operator, epsilon)()
    f = operator.softmin_rows(g, epsilon, f)
    if name == "half_step":
        step = partial(operator.softmin_rows, g, epsilon, f)
        error = off(step(), operator.softmin_rows(g, epsilon)) / highest
        error = max(error, bench.half_step_error(operator, epsilon, rounded=True))
        return step, error / bench.ACCURACY
    values = torch.randn(operator.cost.points[1].shape, device=operator.a.device)
    values[:, 0] = 1
    apply = partial(operator.plan(f, g, epsilon).applied, values)
    return apply, off(apply().values[:, 0] / operator.a, 1) / PLAN_ACCURACY


def off(result: Tensor, expected: Tensor | float) -> float:
    """The largest difference."""
    return float((result - expected).abs().max())


def with_itself(operator: KernelOperator) -> KernelOperator:
    """The cost of an operator's first cloud with itself."""
    cost = operator.cost
    x, costs = cost.clouds[0], cost.class_costs
    return KernelOperator(LabelledCost(x, x, (costs + costs.T) / 2, cost.lambda_x), "fast")


def profile(name: str, d: int, rates: dict[str, float]) -> dict[str, Any]:
    """One row."""
    operator = bench.make_operator(SAMPLES, d, bench.CLASSES, "fast")
    call, error = prepare(name, operator)
    if not error <= 1:
        raise SystemExit(f"{name}, d={d}: off by {error:.1f} times what is allowed")

    def run() -> None:
        for _ in range(IN_A_ROW):
            call()

    taken = milliseconds(run) / IN_A_ROW
    clock = clock_mhz(run)
    counts = count(name, operator)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    floors = {
        "tensor_cores": counts.operations / rates["cublas_float16_tflops"] / 1e9,
        "exp2": counts.exponentials / (multiprocessors * EXP2_PER_CYCLE * clock * 1e3),
        "device_memory": counts.memory_bytes / rates["copy_tb_per_s"] / 1e9,
    }
    return {
        **{"call": name, "n": SAMPLES, "d": d, "classes": bench.CLASSES, "ms": taken},
        "floor_ms": floors,
        "utilisation": {unit: floor / taken for unit, floor in floors.items()},
        "limiter": max(floors, key=lambda unit: floors[unit]),
        **counts._asdict(),
        "tflops": counts.operations / taken / 1e9,
        "cache_tb_per_s": counts.cache_bytes / taken / 1e9,
        **rates,
        "multiprocessors": multiprocessors,
        "sm_clock_mhz": clock,
        "error_over_allowed": error,
        "kernels": compiled(KERNELS[name], d),
    }


def clock_mhz(run: Callable[[], object]) -> float:
    """The multiprocessors' clock while `run` repeats."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    command.append(f"--id={torch.cuda.current_device()}")
    query = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while query.poll() is None:
        run()
    torch.cuda.synchronize()
    return float(query.communicate()[0])


def compiled(kernel: Any, d: int) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of a kernel's variants at one dimension."""
    variants: list[dict[str, Any]] = []
    # Triton's own bookkeeping: another version may keep it elsewhere.
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        caches = kernel.device_caches.values()
        for variant in [variant for cache in caches for variant in cache[0].values()]:
            names = {kernel.arg_names[i[0]]: value for i, value in variant.src.constants.items()}
            row = {name: value for name, value in names.items() if name.isupper()}
            row |= {"registers": variant.n_regs, "spills": variant.n_spills}
            row |= {"shared_bytes": variant.metadata.shared, "warps": variant.metadata.num_warps}
            if row["DIM"] == d:
                variants.append(row)
    return variants


def counters(d: int) -> dict[str, Any]:
    """Hardware counters of one launch of the half-step's kernel, or the reason why not."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return {"reason": "ncu is not on PATH"}
    code = f"from experiments.profile_half_step import launch; launch({d})"
    wait = partial(subprocess.run, capture_output=True, text=True, timeout=LONGEST_COUNTING)
    options = ["--profile-from-start", "off", "--kernel-name", "half_step_kernel"]
    options += ["--launch-count", "1", "--clock-control", "none", "--csv", "--print-units", "base"]
    try:
        # Counters are named differently on other chips.
        listed = wait([ncu, "--query-metrics"])
        known = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
        wanted = [name for name in COUNTERS if name.partition(".")[0] in known] or COUNTERS
        done = wait([ncu, *options, "--metrics", ",".join(wanted), sys.executable, "-c", code])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": f"{type(error).__name__}: {error}"[:160]}
    table = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
    found = {row["Metric Name"]: row["Metric Value"].replace(",", "") for row in table}
    if found:
        return {name: float(value) for name, value in found.items() if value[:1].isdigit()}
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
    return {"reason": (lines or ["ncu wrote no counters"])[-1][:160]}


def launch(d: int) -> None:
    """One half-step for a profiler to look at."""
    half_step, _ = prepare("half_step", bench.make_operator(SAMPLES, d, bench.CLASSES, "fast"))
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    half_step()
    torch.cuda.synchronize()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Times beside the units' floors, stacked as if units never worked at the same time."""
    from matplotlib.patches import Patch

    figure = new_figure(11, 4)
    for place, name in enumerate(KERNELS, 1):
        axes = figure.add_subplot(1, len(KERNELS), place)
        shown = sorted((row for row in rows if row["call"] == name), key=lambda row: row["d"])
        for x, row in enumerate(shown):
            axes.bar(x - 0.2, row["ms"], 0.38, color="#bbbbbb", edgecolor=INK)
            share = f"{max(row['utilisation'].values()):.0%}"
            axes.text(x - 0.2, row["ms"], share, ha="center", va="bottom", fontsize=9)
            below = 0.0
            for unit, color in COLORS.items():
                axes.bar(x + 0.2, row["floor_ms"][unit], 0.38, below, color=color, edgecolor=INK)
                below += row["floor_ms"][unit]
        # Room for the last share.
        axes.margins(y=0.1)
        axes.set_xticks(range(len(shown)), [str(row["d"]) for row in shown])
        axes.set(title=name.replace("_", " "), xlabel="d", ylabel="milliseconds a call")
    bars = {"measured (highest floor's share)": "#bbbbbb"}
    bars |= {f"floor: {unit.replace('_', ' ')}": color for unit, color in COLORS.items()}
    handles = [Patch(facecolor=color, edgecolor=INK, label=label) for label, color in bars.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False)
    figure.subplots_adjust(left=0.06, right=0.99, top=0.92, bottom=0.22, wspace=0.25)
    save_picture(figure, path)


def main() -> None:
    """Write profile_half_step.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    options = {"folder": arguments.output, "again": arguments.again}
    rows = Rows("profile_half_step", ("call", "d"), "torch", "triton", **options)
    rates = best_rates()
    for d, name in product(DIMENSIONS, KERNELS):
        if not rows.has(call=name, d=d):
            rows.add(profile(name, d, rates))
    draw(rows.rows, arguments.output / "profile_half_step.png")
    for d in COUNTED_BY_NCU:
        if not rows.has(call="ncu", d=d):
            rows.add({"call": "ncu", "d": d, **counters(d)})


if __name__ == "__main__":
    main()
