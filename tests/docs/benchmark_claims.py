"""What the tables of docs/benchmarks.md and docs/scale.md show, in the order of these pages."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from result_rows import EPSILONS, Claim, content, row, seconds_to_converge

SMALL_EPSILONS = (0.1, 0.01)


def large() -> Iterator[Claim]:
    by_epsilon = {
        r["epsilon_relative"]: r["seconds"]["solve"] for r in content("time_to_certified")["rows"]
    }
    yield (
        "all of MNIST to all of Fashion-MNIST, pixels, certified",
        [by_epsilon[None], by_epsilon[0.01]],
    )
    r = row("bench_divergence", n=60000, d=784)
    both = r["forward_ms"]
    yield (
        "debiased divergence with labels, 60,000",
        [both["ours"], both["flash_sinkhorn"], r["forward_ratio"]],
    )
    r = row("bench_half_step", n=60000, d=784)
    times = r["ms_per_half_step"]
    ratio = r["times_faster_than_flash_sinkhorn"]
    yield "one pass over all scores", [times["ours_labels"], times["flash_sinkhorn"], ratio]
    r = row("bench_losses", epsilon=0.1)
    yield "256 divergences of 200", [r["ours_ms"], r["geomloss_ms"], r["one_by_one_ms"]]
    r = content("bench_cpu")["kept"][0]
    seconds = r["seconds_per_iteration"]
    yield (
        "one Sinkhorn iteration, 5,000",
        [
            *(seconds["ours"], seconds["geomloss"], r["times_faster_than_geomloss"]),
            *(seconds["pot"], r["times_faster_than_pot"]),
        ],
    )


def to_convergence() -> Iterator[Claim]:
    for target, points, n in [
        *(("Fashion-MNIST", "pixels", 60_000), ("Fashion-MNIST", "512 features", 60_000)),
        *(("Fashion-MNIST", "512 features", 2000), ("USPS", "pixels", 2000)),
    ]:
        # Of USPS in seconds on a processor.
        machine, unit = ("cpu", 1.0) if target == "USPS" else ("cuda", 1e3)
        pair = f"mnist -> {target.lower().replace('-', '_')}"
        keys = {"pair": pair, "points": points.removeprefix("512 "), "n": n}
        found = [
            seconds_to_converge(f"bench_convergence_{machine}", epsilon_relative=epsilon, **keys)
            for epsilon in EPSILONS
        ]
        shown = [number for ours, times in found for number in (unit * ours, times)]
        yield f"MNIST → {target}, {points}, {n:,}", shown


def small() -> Iterator[Claim]:
    for start, n, d in [("100, 64", 100, 64), ("1,000, 64", 1000, 64), ("5,000, 16", 5000, 16)]:
        rows = [
            row("bench_small", n=n, d=d, epsilon=epsilon, labels=labels)
            for labels in (False, True)
            for epsilon in SMALL_EPSILONS
        ]
        keys = ("ours_with_gradient_ms", "flash_sinkhorn_ms", "geomloss_ms")
        others = [r[key] for key in keys for r in rows[:2]]
        yield start, [*(r["ours_ms"] for r in rows), *others]


def exact() -> Iterator[Claim]:
    keys: dict[str, Any] = {"n": 60000, "d": 784}
    seconds = [row("bench_exact_cuda", method=m, **keys)["seconds"] for m in ("1e-3", "proven")]
    yield "60,000 images a side", seconds
    r = row("bench_exact_pass_h200", method="pass", **keys)
    theirs = [r[f"flash_sinkhorn_{kind}"]["milliseconds"] for kind in ("float32", "tf32")]
    yield "one pass over their costs", [r["milliseconds"], *theirs]
    methods = ("ours, width 1e-4", "ours, proven", "POT emd2", "SciPy assignment", "lapx lapjv")
    rows = [row("bench_exact_cpu", n=4000, d=784, method=method) for method in methods]
    yield "4,000 images a side", [r["processor_seconds"] for r in rows]


def unbalanced() -> Iterator[Claim]:
    for start, machine, kind, n, others in [
        ("divergence, 10,000", "cuda", "divergence", 10_000, ("geomloss",)),
        ("divergence, 1,000", "cuda", "divergence", 1000, ("flash_sinkhorn", "geomloss")),
        ("divergence on one core, 1,000", "cpu", "divergence", 1000, ("geomloss",)),
        ("divergence on one core, 200", "cpu", "divergence", 200, ("geomloss",)),
        ("one transport of a given matrix", "cpu", "term", 200, ("POT",)),
    ]:
        ours, *theirs = (
            row(f"bench_unbalanced_{machine}", kind=kind, n=n, method=method)["ms"]
            for method in ("ours", *others)
        )
        yield start, [ours, *(number for ms in theirs for number in (ms, ms / ours))]


def label_kinds() -> Iterator[Claim]:
    gpu, cpu = content("bench_class_distances_cuda"), content("bench_class_distances_cpu")
    one, tenth = gpu["images"]
    two_cores = cpu["images"][0]

    def others(measured: dict[str, Any], finer: float) -> list[float]:
        times = [measured["geomloss"][f"scaling {s}"]["times_faster"] for s in (0.5, finer)]
        return [measured["times_faster_than_pair_by_pair"], 0.5, times[0], finer, times[1]]

    seconds = [one["gaussian_seconds"], one["sinkhorn_seconds"]]
    yield "20 classes of 6,000 points", [*seconds, *others(one, 0.99)]
    yield "the same, `sinkhorn` at epsilon 0.1", [tenth["sinkhorn_seconds"], *others(tenth, 0.99)]
    many = gpu["many"]
    yield "4,000 classes of 64 points", [many["gaussian_seconds"], many["sinkhorn_seconds"]]
    yield "20 classes of MNIST and USPS", [two_cores["sinkhorn_seconds"], *others(two_cores, 0.999)]
    few, most = (row("bench_label_sets_cuda", d=64, sets=sets) for sets in (256, 2534))
    passes = [few["table_softmin"], most["columns_softmin"]]
    built = [few["table_build"], most["columns_build"]]
    yield "one pass over 4,000 × 4,000 rows", [1e3 * seconds for seconds in (*passes, *built)]


def nearest() -> Iterator[Claim]:
    (r,) = content("bench_nearest_cuda")["rows"]
    times = [query["seconds"] for query in r["queries"]]
    yield "the nearest five of 5,000", [min(times), max(times), r["index_seconds"]]
    (queries,) = (r["queries"] for r in content("bench_nearest_cpu")["rows"] if "queries" in r)
    query = next(query for query in queries if query["query"].startswith("mnist"))
    yield "the nearest five of 200", [query["cpu_seconds"], query["full_cpu_seconds"]]


def shift() -> Iterator[Claim]:
    for machine, n in (("cuda", 2000), ("cpu", 200)):
        r = row(f"bench_shift_{machine}", rows=n, permutations=199)
        yield f"{n:,} + {n:,} rows", [r["seconds"], r["sinkhorn_losses_seconds"]]


def mixtures() -> Iterator[Claim]:
    yield "20 sources of 3,000 rows", [content("bench_mixture_cuda")["rows"][0]["seconds"]]


def spaces() -> Iterator[Claim]:
    rows = [row("bench_gromov_cpu", n=1000, method=m) for m in ("ours, 4 starts", "POT", "OTT")]
    yield "1,000 × 1,000 digits", [r["processor_seconds"] for r in rows]
    for n in (10_000, 60_000):
        yield f"{n:,} × {n:,} images", [row("bench_gromov_cuda", n=n, method="ours")["seconds"]]


def attention() -> Iterator[Claim]:
    def measured(method: str, iterations: int, n: int = 8192, backward: bool = False) -> Any:
        keys = {"n": n, "iterations": iterations, "backward": backward}
        return row("bench_attention_cuda", method=method, **keys)

    softmax = "scaled_dot_product_attention"
    methods = ("ours", "compiled loop", "loop")
    yield "softmax attention", [measured(method, 0)["ms"] for method in ("ours", softmax)]
    yield "three iterations, forward, 8,192", [measured(method, 3)["ms"] for method in methods]
    ours, *loops = (measured(method, 3, backward=True)["ms"] for method in methods)
    theirs = measured(softmax, 0, backward=True)["ms"]
    yield "three iterations, forward and backward, 8,192", [ours, theirs, *loops]
    most = [measured("ours", 3, n=65_536), measured(softmax, 0, n=65_536)]
    numbers = [r[key] for r in most for key in ("ms", "peak_MiB")]
    yield "three iterations, forward, 65,536", numbers


def matrices() -> Iterator[Claim]:
    for start, n in [("1,024 |", 1024), ("4,096 |", 4096), ("16,384 |", 16384)]:
        yield (
            start,
            [
                1e3 * row("bench_matrix_cuda", n=n, epsilon=epsilon, method=method)["seconds"]
                for method in ("ours", "POT sinkhorn_log", "PyTorch", "OTT-JAX")
                for epsilon in EPSILONS
            ],
        )


def many_matrices() -> Iterator[Claim]:
    def ms(count: int, method: str, way: str) -> float:
        keys = {"n": 4, "B": count, "iterations": 20, "backward": False}
        found: float = row("bench_batched_cuda", method=method, **keys)[way]["ms"]
        return found

    others = ("torch.compile", "liger-kernel", "POT", "OTT-JAX")
    for start, count in [("1,048,576 of 4 × 4", 1048576), ("1,024 of 4 × 4", 1024)]:
        ours = [ms(count, "ours", way) for way in ("in_graph", "called")]
        yield start, [*ours, *(ms(count, method, "called") for method in others)]


def on_a_processor() -> Iterator[Claim]:
    for start, n, d in [
        ("debiased divergence, 50 × 50, d = 8", 50, 8),
        ("the same, 500 × 500, d = 64", 500, 64),
    ]:
        rows = [
            row("bench_small_cpu", n=n, d=d, epsilon=epsilon, labels=False)
            for epsilon in SMALL_EPSILONS
        ]
        yield start, [r[key] for key in ("ours_ms", "geomloss_ms") for r in rows]
    methods = ("ours", "OTT-JAX", "PyTorch", "POT sinkhorn_log")
    found = [row("bench_matrix_cpu", n=1024, epsilon=0.01, method=method) for method in methods]
    yield "a given matrix, 1,024 × 1,024", [1e3 * r["seconds"] for r in found]
    keys = {"n": 4, "B": 256, "iterations": 20, "backward": False}
    found = [row("bench_batched_cpu", method=m, **keys) for m in ("ours", "torch.compile", "loop")]
    yield "256 matrices 4 × 4", [r["called"]["ms"] for r in found]


def gradients() -> Iterator[Claim]:
    r = row("bench_divergence", n=60000, d=784)
    both = r["forward_and_gradient_ms"]
    ours = [both["ours"], both["flash_sinkhorn"], r["gradient_ratio"]]
    yield "debiased divergence and its gradient", ours
    r = row("bench_adjoint_cuda", n=16)
    sides = ("autograd", "compiled", "ott_jax", "jaxopt")
    times = [r["ours"]["graph_ms"], r["ours"]["ms"], *(r[side]["ms"] for side in sides)]
    yield "implicit gradients of 65,536", times
    keys = {"n": 1000, "relative_epsilon": 0.1}
    r = row("bench_map_gradient_cuda", method="potentials", **keys)
    ours = [r["forward_ms"], r["backward_ms"]]
    # Whole, or in batches of rows, where it was measured in both ways.
    theirs = min(
        r["ms"]
        for r in content("bench_map_gradient_cuda")["rows"]
        if r["method"].startswith("ott_jax") and all(r[key] == keys[key] for key in keys)
    )
    yield "potentials by the points", [*ours, theirs, theirs / sum(ours)]
    r = row("bench_map_gradient_cuda", method="map", n=50000, relative_epsilon=0.1)
    yield "transport map by the points", [r["forward_ms"], r["backward_ms"]]
    first, again, theirs = (
        row("bench_hvp_cuda", n=50000, d=64, method=method)["ms"]
        for method in ("product", "again", "flash_sinkhorn")
    )
    yield "one Hessian product", [first, again, theirs, theirs / first]
    starts = [
        r
        for r in content("shuffled_regression")["rows"]
        if r["epsilon"] == 0.5 and r["method"] == "ours"
    ]
    assert all(r["cells"] == 40_000 and r["ended_by_gradient"] for r in starts)
    yield "regression of 40,000", [median(r[key] for r in starts) for key in ("seconds", "steps")]


def flows() -> Iterator[Claim]:
    gpu = content("bench_flow_cuda")
    fixed = gpu["fixed"]
    theirs = fixed["flash_sinkhorn_divergence_with_gradient_ms"]
    yield "a step, labels, 60,000", [fixed["ms_per_step"], theirs, fixed["ratio"]]
    yield (
        "all of MNIST to all of Fashion-MNIST, pixels, 20",
        [r["seconds"] for r in gpu["converged"]],
    )
    r = row("reproduce_otdd_scaling", task="flow", n=60000)
    numbers = [
        number
        for side in ("tensorized", "geomloss")
        for number in (r["sides"][side]["ms"] / 1e3, r["ratio"][side])
    ]
    yield "20 steps, 60,000 points, 512", [r["sides"]["ours"]["ms"] / 1e3, *numbers]
    seconds = [
        row("bench_scale_cuda", workload="flow", processes=count)["seconds"] for count in (1, 2)
    ]
    yield "20 steps, 60,000 points, 784", seconds
    yield "20 steps, 899 digits", [content("bench_flow_cpu")["converged"][0]["seconds"]]


def memory() -> Iterator[Claim]:
    certified = content("time_to_certified")["rows"]
    most = max(r["peak_mib_over_inputs"] for r in certified)
    yield "all of MNIST to all of Fashion-MNIST, pixels, both", [most]
    extra = row("bench_divergence", n=60000, d=512)["extra_mib_with_gradient"]
    yield "divergence and gradient, 60,000", [extra["ours"], extra["flash_sinkhorn"]]
    sides = [
        row("reproduce_otdd_scaling", task=task, n=60000, points="features")["sides"]
        for task in ("distance", "flow")
    ]
    scales = (("ours", 1), ("tensorized", 1024), ("geomloss", 1024))
    yield (
        "distance / flow of 60,000",
        [side[name]["peak_mib"] / scale for name, scale in scales for side in sides],
    )


def bounds() -> Iterator[Claim]:
    found = content("bench_bounds_cpu")
    extra = [
        100 * max(r["extra_time"] for r in found["rows"] if (r["epsilon_relative"] == 0.1) == first)
        for first in (True, False)
    ]
    yield "more time, at 0.1", [*extra, 100 * found["largest_width_over_value"]]
    for name, start in [("cpu", "random problems"), ("cuda", "the same on a GPU")]:
        checked = content(f"verify_bounds_{name}")
        status = checked["status"]
        numbers = [len(checked["violations"]), status.get("undecided", 0), status["refused"]]
        yield start, [*numbers, checked["problems"]]


def several_gpus() -> Iterator[Claim]:
    """Yield the rows of docs/scale.md."""
    for workload, alone in [
        *(("imagenet_0.1", "imagenet_0.1"), ("imagenet_0.01", "imagenet_0.01")),
        *(("imagenet_ring", "imagenet_0.1"), ("four_million", None)),
        *(("class_table", "class_table"), ("flow", "flow")),
    ]:
        two = row("bench_scale_cuda", workload=workload, processes=2)
        shown, held = [two["seconds"]], [max(two["gib_per_process"])]
        if alone:
            one = row("bench_scale_cuda", workload=alone, processes=1)
            shown = [one["seconds"], two["seconds"], one["seconds"] / two["seconds"]]
            held = [max(one["gib_per_process"]), *held]
        # Class tables are put together on the CPU; what they exchange is not timed.
        share = two["communication_share"]
        yield f"`{workload}`:", [*shown, *([] if share is None else [100 * share]), *held]


def sentences() -> Iterator[str]:
    """Yield what the sentences of docs/benchmarks.md say in numbers, in the order of the page."""

    def power(value: float) -> str:
        return f"{value:.0e}".replace("e-0", "e-")

    r = row("bench_divergence", n=60000, d=784)
    ours, theirs = (
        (r["half_passes"][side], power(r["marginal_error"][side]))
        for side in ("ours", "flash_sinkhorn")
    )
    yield f"are {ours[0]} passes here, which end at a marginal error of {ours[1]}"
    yield f"and {theirs[0]} in flash-sinkhorn, which end at {theirs[1]}"
    extra = content("bench_cold_start")["extra_seconds_of_the_first_call"]
    yield f"takes {extra['empty_cache']:.1f} s more, for compilation"
    yield f"later processes {extra['filled_cache']:.1f} s"
    passes = {
        (r["pair"], r["points"], r["n"], r["method"]): r["passes_to_target"]
        for r in content("bench_convergence_cuda")["rows"]
        if r["epsilon_relative"] == 0.001 and r["method"] in ("ours", "plain")
    }
    more = [
        passes[*case, "plain"] / count
        for (*case, method), count in passes.items()
        if method == "ours" and passes.get((*case, "plain"))
    ]
    yield f"updates take {min(more):.2g} to {max(more):.2g} times as many passes as ours"
    off = {
        side: 100
        * max(abs(r["off"][side]) for r in content("bench_small")["rows"] if side in r["off"])
        for side in ("flash_sinkhorn", "geomloss")
    }
    yield f"flash-sinkhorn end up to {off['flash_sinkhorn']:.1g}% off"
    yield f"is up to {off['geomloss']:.1g}% off"
    our_ms, their_ms = (
        row("bench_unbalanced_cpu", kind="term", n=1000, method=method)["ms"]
        for method in ("ours", "POT")
    )
    yield f"of 1,000 points ours takes {our_ms:.0f} ms and POT {their_ms:.0f} ms"
    our_ms, their_ms = (
        row("bench_unbalanced_cuda", kind="term", n=1000, method=method)["ms"]
        for method in ("ours", "POT")
    )
    yield f"on the GPU {our_ms:.1f} and {their_ms:.1f} ms"
    apart = [
        100 * r["off"]
        for device in ("cpu", "cuda")
        for r in content(f"bench_unbalanced_{device}")["rows"]
        if r["method"] == "geomloss"
    ]
    yield f"geomloss's values are {min(apart):.1f} to {max(apart):.1f}% off"
    (r,) = content("bench_nearest_cuda")["rows"]
    proven = [query["certified"] for query in r["queries"]]
    assert proven == [False, True, True]
    yield "Of the three queries on the GPU two are certified"
    gpu = content("bench_class_distances_cuda")
    images = [*gpu["images"], content("bench_class_distances_cpu")["images"][0]]
    width = max(r["relative_width_of_bounds"] for r in (*gpu["images"], gpu["many"]))
    yield f"the median interval is at most {100 * width:.2f}% of the distance wide"
    errors = {
        scaling: [
            r["geomloss"][f"scaling {scaling}"]["median_marginal_error"]
            for r in images
            if f"scaling {scaling}" in r["geomloss"]
        ]
        for scaling in (0.5, 0.99, 0.999)
    }
    yield f"its median marginal error is {min(errors[0.5]):.2f} or more"
    yield f"At 0.99 it is at most {power(max(errors[0.99]))}"
    yield f"at 0.999 at most {power(max(errors[0.999]))}"
    loops = [
        row("bench_attention_cuda", method=method, n=8192, iterations=3, backward=False)["peak_MiB"]
        for method in ("compiled loop", "loop")
    ]
    yield f"64 times the {loops[0] / 1024:.1f} and {loops[1] / 1024:.1f} GiB"
    short = [
        row("bench_attention_cuda", method=method, n=2048, iterations=3, backward=True)
        for method in ("compiled loop", "ours")
    ]
    assert short[0]["ms"] < short[1]["ms"]
    ms, mib = ([r[key] for r in short] for key in ("ms", "peak_MiB"))
    yield f"the compiled loop is faster: {ms[0]:.1f} ms, ours {ms[1]:.1f} ms**"
    yield f"in {mib[0]:,.0f} and {mib[1]:.0f} MiB"
    least = [
        row("bench_attention_cuda", method=method, n=1024, iterations=3, backward=False)["ms"]
        for method in ("compiled loop", "ours")
    ]
    assert least[0] < least[1]
    yield f"it is faster forward too: {least[0]:.2f} ms, ours {least[1]:.2f} ms.**"
    fifty = [
        row("bench_small_cpu", n=50, d=64, epsilon=epsilon, labels=False)
        for epsilon in SMALL_EPSILONS
    ]
    assert fifty[0]["ours_ms"] < fifty[0]["geomloss_ms"]
    assert fifty[1]["geomloss_ms"] < fifty[1]["ours_ms"]
    theirs, ours = ([r[key] for r in fifty] for key in ("geomloss_ms", "ours_ms"))
    yield f"geomloss takes {theirs[0]:.1f} / **{theirs[1]:.1f} ms**"
    yield f"ours {ours[0]:.1f} / {ours[1]:.0f} ms"
    error = row("bench_divergence", n=60000, d=784)["gradient_error"]
    yield f"off by {power(error['ours'])} of the largest coordinate"
    yield f"flash-sinkhorn's by {power(error['flash_sinkhorn'])}"
    damped = row("shuffled_regression", epsilon=0.5, seed=0, method="damped")
    assert not damped["ended_by_gradient"]
    yield f"had not ended after {damped['steps']} steps"


SECTIONS = (
    *(large, to_convergence, small, exact, unbalanced, label_kinds, nearest, shift, mixtures),
    *(spaces, attention, matrices, many_matrices, on_a_processor, gradients, flows, memory, bounds),
)
