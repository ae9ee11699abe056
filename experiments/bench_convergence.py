"""Marginal error and width of the bounds against time and passes: ours, plain updates, the peers.

    python -m experiments.bench_convergence --data-root DIR --device cpu
    python -m experiments.bench_convergence --data-root DIR --device cuda --sizes 60000

The cross term OT_epsilon(x, y) of MNIST -> Fashion-MNIST and MNIST -> USPS (7,291 points at most),
pixels at 28 x 28 (d = 784) and features of a ResNet18 trained here (d = 512; on a tenth of the
images without a GPU), epsilon a multiple of the mean cost. Peers know no labels, so all solve
||x - y||^2 / 2 without class distances, and that problem alone is compared; ours is measured with
gaussian class distances too.

A trace starts at the clouds on the device and holds, for each look, the seconds and the sweeps over
n x m scores until then; the L1 marginal error of the potentials, of the larger marginal, by our own
`high` (GPU) or `double` operator; and the bounds that our certificate proves from them. Looks are
not timed. Methods that round the points (ours while iterating, flash-sinkhorn to TF32) also get
their error on the points as they round them, and a peer or plain updates reach the target if either
error does; ours only on the points as given. How each method is run: `convergence/methods.py` and
`convergence/rivals.py`. All passes of ours count: looks, rejected steps and certification. Of the
others only updates count.

On a processor times are its own, on one core; on a GPU they are the wall's, kernels compiled and
tuned before. A peer is given up after a hundred times our time, or --time-cap; flash-sinkhorn's
alternating solver and POT take as many iterations as plain updates took, or a few more.

Rows are written as they are measured, and kept when the script runs again.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.convergence import rivals
from experiments.convergence.methods import Budgets, Chain, Plain, Settings, ours
from experiments.convergence.picture import draw
from experiments.convergence.problem import (
    FEW_TRAINING_IMAGES,
    TARGET,
    TRAINING_IMAGES,
    Clouds,
    CrossTerm,
    make_term,
)
from experiments.convergence.summary import find, summarize
from experiments.convergence.tracing import TimeLimitError, Trace, time_limit, trace_method
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.samples import LabeledSamples

PAIRS = {"fashion_mnist": ("mnist", "fashion_mnist"), "usps": ("mnist", "usps")}
EPSILONS = (1e-1, 1e-2, 1e-3)
SIZES = (60_000, 10_000, 2_000)
POINTS = ("pixels", "features")
KEYS = ("pair", "points", "n", "epsilon_relative", "method")
PACKAGES = ("torch", "triton", "flash-sinkhorn", "geomloss", "ott-jax", "jax", "POT")
# A method that takes this many times ours is given up, but not within a second.
GIVE_UP = 100.0
# Training is not the same twice on a GPU, and neither are its features.
SAME_EPSILON = 1e-6
# Compilation, tuning and looks, in seconds beside three caps.
PATIENCE = 120.0
# Where guided methods are run, of plain updates' iterations to these errors.
GUIDES = (0.1, 0.01, TARGET)
MORE = (1.15, 1.4, 2.0)

Method = Chain | Budgets | Settings


@dataclass(frozen=True)
class Contender:
    """How to make a method: from the term, and the iterations that plain updates took."""

    make: Callable[[CrossTerm, list[int]], Method]
    device: str | None = None
    largest: int | None = None


CONTENDERS: dict[str, Contender] = {
    "ours": Contender(lambda term, _: ours(term)),
    "ours, labels": Contender(lambda term, _: ours(term)),
    "plain": Contender(lambda term, _: Plain(term)),
    "flash-sinkhorn": Contender(lambda term, _: rivals.FlashSymmetric(term), "cuda"),
    "flash-sinkhorn alternating": Contender(rivals.flash_alternating, "cuda"),
    "geomloss": Contender(lambda term, _: rivals.geomloss(term)),
    "OTT-JAX": Contender(lambda term, _: rivals.Ott(term), "cpu", 10_000),
    "POT": Contender(lambda term, steps: rivals.pot(term, steps, log_domain=False)),
    "POT log": Contender(
        lambda term, steps: rivals.pot(term, steps, log_domain=True), None, 10_000
    ),
}


def guides(rows: list[dict[str, Any]], keys: dict[str, Any]) -> list[int]:
    """Iterations for methods that are told a number, from the trace of plain updates."""
    plain = find(rows, {**keys, "method": "plain"})
    trace = [] if plain is None else plain.get("trace", [])
    if not trace:
        return [10, 30, 100, 300, 1000]
    found = []
    for error in GUIDES:
        below = [point["passes"] for point in trace if _lowest(point) <= error]
        found.append((below or [trace[-1]["passes"]])[0] // 2)
    return sorted({*found, *(round(found[-1] * more) for more in MORE)})


def measure(contender: Contender, term: CrossTerm, counts: list[int], cap: float) -> dict[str, Any]:
    """The entries of a row that a method fills; what goes wrong is told as text."""
    started = time.perf_counter()
    try:
        with time_limit(3 * cap + PATIENCE), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            trace = trace_method(contender.make(term, counts), term, cap)
        entries = describe(trace)
    except ImportError as error:
        entries = {"failed": f"not installed: {error.name}"}
    except torch.OutOfMemoryError:
        entries = {"failed": "out of memory"}
    except TimeLimitError as error:
        entries = {"failed": str(error)}
    # A peer may fail in any way, and the other rows are still wanted.
    except Exception as error:
        entries = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**entries, "whole_seconds": time.perf_counter() - started}


def describe(trace: Trace) -> dict[str, Any]:
    """The time and the passes to the target, and the trace."""
    reached = next((point for point in trace.points if _lowest(point) <= TARGET), None)
    return {
        "seconds_to_target": None if reached is None else reached["seconds"],
        "passes_to_target": None if reached is None else reached["passes"],
        "at_least_seconds": trace.at_least if reached is None else None,
        "stopped": trace.stopped,
        "trace": trace.points,
    }


def refuse_apart(row: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    """Intervals that hold one number must meet; a row whose do not with ours is refused."""
    proven = [point["bounds"] for point in row.get("trace", []) if point["bounds"]]
    proven += [point["bounds"] for point in known if point["bounds"]]
    if proven and max(low for low, _ in proven) > min(high for _, high in proven):
        return {"failed": f"refused: intervals apart, {proven}"}
    return row


def _lowest(point: dict[str, Any]) -> float:
    errors = (point["error"], point["own_error"])
    return min((error for error in errors if error is not None), default=float("inf"))


def bench(
    rows: Rows, clouds: list[LabeledSamples], keys: dict[str, Any], given: argparse.Namespace
) -> None:
    """All methods on one problem, as far as they have no row yet."""
    compute = otdd.ComputeOptions(device=given.device, backend=given.backend)
    unlabelled = make_term(clouds, keys["epsilon_relative"], compute, labels=False)
    forget_others(rows, keys, unlabelled.epsilon)
    for method in given.methods:
        contender = CONTENDERS[method]
        n = len(clouds[0])
        if rows.has(**keys, method=method) or contender.device not in (None, given.device):
            continue
        if contender.largest is not None and n > contender.largest:
            continue
        term, labels = unlabelled, method == "ours, labels"
        if labels:
            term = make_term(clouds, keys["epsilon_relative"], compute, labels=True)
        mine = find(rows.rows, {**keys, "method": "ours"}) or {}
        cap = given.plain_cap if method == "plain" else given.time_cap
        if method != "plain" and mine.get("seconds_to_target"):
            cap = min(cap, max(1.0, GIVE_UP * mine["seconds_to_target"]))
        entries = measure(contender, term, guides(rows.rows, keys), cap)
        if not labels:
            entries = refuse_apart(entries, mine.get("trace", []))
        head = {"m": len(clouds[1]), "d": clouds[0].dim, "epsilon": term.epsilon, "cap": cap}
        rows.add({**keys, "method": method, **head, **entries})


def forget_others(rows: Rows, keys: dict[str, Any], epsilon: float) -> None:
    """Drop the rows of a problem whose features came from another training of the network."""
    mine = find(rows.rows, {**keys, "method": "ours"})
    if mine is not None and abs(mine["epsilon"] / epsilon - 1) > SAME_EPSILON:
        rows.rows = [row for row in rows.rows if any(row[key] != keys[key] for key in keys)]


def problems(given: argparse.Namespace) -> Iterator[tuple[list[LabeledSamples], dict[str, Any]]]:
    """Clouds and keys, the largest first."""
    loaded = Clouds(given.data_root, given.device, given.training_images)
    for n, points, pair in product(given.sizes, given.points, given.pairs):
        clouds = loaded.pair(PAIRS[pair], points, n)
        for relative in given.epsilons:
            keys = {"pair": " -> ".join(PAIRS[pair]), "points": points}
            yield clouds, {**keys, "n": n, "epsilon_relative": relative}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", help="needed but with --draw-only")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--sizes", type=int, nargs="+", help="2000, and with cuda 10000 and 60000")
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--points", nargs="+", choices=POINTS, help="by default both")
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--methods", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--time-cap", type=float, default=20.0, help="seconds for a peer's trace")
    parser.add_argument("--plain-cap", type=float, default=60.0, help="for plain updates' trace")
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 100 points, one second")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing more")
    parser.add_argument("--all-pictures", action="store_true", help="of every n, width and passes")
    given = parser.parse_args()
    if given.data_root is None and not given.draw_only:
        parser.error("--data-root DIR is needed to measure")
    on_cpu = given.device == "cpu"
    given.sizes = given.sizes or (SIZES[-1:] if on_cpu else SIZES)
    given.points = given.points or POINTS
    given.training_images = FEW_TRAINING_IMAGES if on_cpu else TRAINING_IMAGES
    if given.quick:
        given.sizes, given.epsilons, given.time_cap, given.plain_cap = [100], [1e-1, 1e-2], 1.0, 1.0
        given.training_images = 100
    return given


def main() -> None:
    """Write bench_convergence_DEVICE.json and its pictures, and print the ratios."""
    given = parse()
    if given.device == "cpu":
        # One core for every package, so that its processor time is its time.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
    name = f"bench_convergence_{given.device}"
    rows = Rows(name, KEYS, *PACKAGES, folder=given.output, again=given.again)
    for clouds, keys in () if given.draw_only else problems(given):
        bench(rows, clouds, keys, given)
    draw(rows.rows, given.output, name, everything=given.all_pictures)
    print("\n".join(summarize(rows.rows)))


if __name__ == "__main__":
    main()
