"""What the table of each question of docs/benchmarks.md shows."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from statistics import median

from result_rows import Claim, at_each_epsilon, content, row, seconds_to_converge


def distances() -> Iterator[Claim]:
    certified = content("time_to_certified")["rows"]
    by_epsilon = {r["epsilon_relative"]: r["seconds"]["solve"] for r in certified}
    yield "all of MNIST to all of Fashion-MNIST, pixels, epsilon", [by_epsilon[None]]
    yield "the same, epsilon a hundredth", [by_epsilon[0.01]]
    divergence = "debiased divergence with labels, 60,000 × 60,000, d = 784, ten iterations"
    for start, n, d in [
        (divergence, 60000, 784),
        ("the same, d = 512", 60000, 512),
        ("the same, d = 512, 20,000 × 20,000", 20000, 512),
    ]:
        r = row("bench_divergence", n=n, d=d)
        yield start, [*r["forward_ms"].values(), r["forward_ratio"]]
    pair = {"pair": "mnist -> fashion_mnist", "points": "pixels", "n": 60000}
    found = at_each_epsilon("bench_convergence_cuda", **pair)
    yield (
        "one transport of MNIST to Fashion-MNIST, pixels, 60,000",
        [*(1000.0 * ours for ours, _ in found), *(times for _, times in found)],
    )
    r = row("bench_small", n=1000, d=64, epsilon=0.1, labels=False)
    yield "debiased divergence, 1,000", [r["ours_ms"], r["flash_sinkhorn_ms"], r["geomloss_ms"]]
    r = row("bench_small", n=5000, d=16, epsilon=0.01, labels=False)
    theirs = r["flash_sinkhorn_ms"]
    yield "**the same, 5,000 × 5,000, d", [r["ours_ms"], theirs, theirs / r["ours_ms"]]
    keys = {"pair": "mnist -> fashion_mnist", "points": "features", "n": 2000}
    ours, times = seconds_to_converge("bench_convergence_cuda", epsilon_relative=0.1, **keys)
    yield "**one transport of MNIST", [1000.0 * ours, 1000.0 * ours * times, times]
    r = row("bench_losses", epsilon=0.1)
    yield "256 divergences of 200", [r["ours_ms"], r["geomloss_ms"], r["one_by_one_ms"]]
    for machine, n, permutations in (("cuda", 500, 999), ("cuda", 2000, 199), ("cpu", 200, 199)):
        r = row(f"bench_shift_{machine}", rows=n, permutations=permutations)
        yield f"shift test of {n:,} + {n:,} rows", [r["seconds"], r["sinkhorn_losses_seconds"]]
    first, second = content("bench_cpu")["kept"]
    ratios = [first["times_faster_than_geomloss"], first["times_faster_than_pot"]]
    seconds = first["seconds_per_iteration"]
    yield (
        "one Sinkhorn iteration, 5,000",
        [seconds["ours"], seconds["geomloss"], ratios[0], seconds["pot"], ratios[1]],
    )
    ratios = [second["times_faster_than_geomloss"], second["times_faster_than_pot"]]
    yield "the same at a tenth of the", [second["seconds_per_iteration"]["ours"], *ratios]
    keys = {"pair": "mnist -> usps", "points": "pixels", "n": 2000}
    found = at_each_epsilon("bench_convergence_cpu", **keys)
    yield (
        "one transport of MNIST to USPS, pixels, 2,000",
        [*(ours for ours, _ in found), *(times for _, times in found)],
    )


def class_distances() -> Iterator[Claim]:
    gpu, cpu = content("bench_class_distances_cuda"), content("bench_class_distances_cpu")
    one, tenth = gpu["images"]
    yield "MNIST and Fashion-MNIST, 20", [one["gaussian_seconds"]]
    for start, measured_at in [
        ("the same, `sinkhorn` at epsilon 1", one),
        ("the same at epsilon 0.1", tenth),
    ]:
        scalings = [
            number
            for scaling in (0.5, 0.99, 0.999)
            for number in (scaling, measured_at["geomloss"][f"scaling {scaling}"]["times_faster"])
        ]
        ratios = [f"times_faster_than_{other}" for other in ("pair_by_pair", "divergences")]
        yield (
            start,
            [measured_at["sinkhorn_seconds"], *(measured_at[key] for key in ratios), *scalings],
        )
    many = gpu["many"]
    yield "2,000 classes of 64 points, d", [many["gaussian_seconds"], many["sinkhorn_seconds"]]
    two_cores = cpu["images"][0]
    times = [two_cores["geomloss"][f"scaling {s}"]["times_faster"] for s in (0.5, 0.999)]
    yield (
        "MNIST and USPS, 500 images",
        [
            two_cores["gaussian_seconds"],
            two_cores["sinkhorn_seconds"],
            two_cores["times_faster_than_pair_by_pair"],
            *(0.5, times[0], 0.999, times[1]),
        ],
    )
    yield "sliced distance, 2,000", [content("bench_study_cpu")["sliced"]["seconds_a_dataset"]]


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
    yield "20 steps, 60,000 points, 512", [r["sides"]["ours"]["ms"] / 1000.0, *numbers]
    r = row("reproduce_otdd_scaling", task="flow", n=5000)
    yield "the same, 5,000 points", [r["sides"]["ours"]["ms"] / 1000.0, *r["ratio"].values()]
    yield "20 steps, 899 digits, each", [content("bench_flow_cpu")["converged"][0]["seconds"]]


def on_a_processor() -> Iterator[Claim]:
    """Given matrices, large ones and many small ones."""
    names = {"OTT": "OTT-JAX", "POT": "POT sinkhorn_log"}
    for start, n, epsilon, others in [
        ("the same problem, 256 points, epsilon 0.1", 256, 0.1, ("PyTorch", "OTT", "POT")),
        ("the same, 1,024 points, 0.01", 1024, 0.01, ("OTT", "PyTorch", "POT")),
        ("the same, 2,048 points, 0.01", 2048, 0.01, ("OTT", "PyTorch", "POT")),
    ]:
        rows = [
            row("bench_matrix_cpu", n=n, epsilon=epsilon, method=names.get(name, name))
            for name in ("ours", *others)
        ]
        yield start, [1000.0 * r["seconds"] for r in rows]
    keys = {"iterations": 20, "backward": False}
    for start, n, count, methods in [
        ("65,536 matrices 4 × 4", 4, 65536, ("ours", "torch.compile", "loop")),
        ("**256 matrices 4 × 4**", 4, 256, ("ours", "torch.compile", "loop")),
        ("**64 matrices 128 × 128**", 128, 64, ("ours", "loop", "OTT-JAX")),
    ]:
        rows = [row("bench_batched_cpu", n=n, B=count, method=m, **keys) for m in methods]
        yield start, [r["called"]["ms"] for r in rows]


def small_on_a_processor() -> Iterator[Claim]:
    """Certified divergences of small clouds."""
    for n, d in ((50, 8), (50, 64), (128, 64), (200, 64), (500, 64)):
        shown = []
        for key, labels in (
            ("ours_ms", False),
            ("ours_ms", True),
            ("ours_with_gradient_ms", False),
            ("geomloss_ms", False),
        ):
            for epsilon in (0.1, 0.01):
                r = row("bench_small_cpu", n=n, d=d, epsilon=epsilon, labels=labels)
                shown.append(r[key])
        yield f"{n}, {d}", shown


def gradients() -> Iterator[Claim]:
    start = "debiased divergence and its gradient, labels, 60,000 × 60,000, d = 784, ten iterations"
    for name, d in [(start, 784), ("the same, d = 512, with its gradient", 512)]:
        r = row("bench_divergence", n=60000, d=d)
        yield name, [*r["forward_and_gradient_ms"].values(), r["gradient_ratio"]]
    r = row("bench_adjoint_cuda", n=16)
    yield (
        "implicit gradients of 65,536",
        [
            *(r["ours"]["graph_ms"], r["ours"]["ms"]),
            *(r["autograd"]["ms"], r["autograd"]["kept_mib"] / 1024),
            *(r["compiled"]["ms"], r["compiled"]["kept_mib"] / 1024),
            *(r[side]["ms"] for side in ("unrolled", "ott_jax", "jaxopt")),
        ],
    )
    yield (
        "1,048,576 of 4 × 4 / 4,096",
        [row("bench_adjoint_cuda", n=n)["ours"]["graph_ms"] for n in (4, 64)],
    )


def implicit() -> Iterator[Claim]:
    def by(
        n: int, method: str = "potentials", epsilon: float = 0.1, machine: str = "cuda"
    ) -> list[float]:
        name = f"bench_map_gradient_{machine}"
        r = row(name, method=method, n=n, relative_epsilon=epsilon)
        return [r["ms"]] if "ms" in r else [r["forward_ms"], r["backward_ms"]]

    start = "**potentials by the points, 1,000 × 1,000, at 0.1**"
    for name, n in [(start, 1000), ("**the same, 10,000 × 10,000**", 10000)]:
        ours = by(n, machine="h100")
        theirs = [*by(n, "ott_jax", machine="h100"), *by(n, "ott_jax_batched", machine="h100")]
        yield name, [*ours, *theirs, min(theirs) / sum(ours)]
    yield "the same, 50,000 × 50,000", by(50000)
    yield "map by the points, 50,000", by(50000, "map")
    yield "the same, at 0.01", by(50000, "map", 0.01)


def curvature() -> Iterator[Claim]:
    def of(n: int, *methods: str, d: int = 64, machine: str = "cuda") -> list[float]:
        return [row(f"bench_hvp_{machine}", n=n, d=d, method=name)["ms"] for name in methods]

    for count, points in [("10,000", 10000), ("50,000", 50000)]:
        size, certified = f"{count} × {count}, d = 64", "solved to 1e-3 and certified"
        first, again, theirs = of(points, "product", "again", "flash_sinkhorn", machine="h100")
        one = f"one product, {size}, the first / another"
        yield one, [first, again, theirs, theirs / first]
        ways = "end_to_end_biased", "flash_sinkhorn_end_to_end", "end_to_end"
        ours, theirs, debiased = of(points, *ways, machine="h100")
        yield f"clouds to product, {certified}, {size}", [ours, theirs, theirs / ours]
        yield f"clouds to debiased product, {certified}, {size}", [debiased]
    yield "25 directions at once, 40,000", of(40000, "directions", d=5)


def regression() -> Iterator[Claim]:
    rows = content("shuffled_regression")["rows"]
    ours = [r for r in rows if r["method"] == "ours"]
    assert all(r["cells"] == 40_000 for r in rows)
    assert all(r["ended_by_gradient"] == (r["method"] == "ours") for r in rows)
    assert all(r["escapes"] for r in ours)
    assert len(ours) == 10
    starts = sorted((r for r in ours if r["epsilon"] == 0.5), key=itemgetter("seconds"))
    assert len(starts) == 9
    shown = itemgetter("steps", "newton_steps", "seconds", "seconds_per_check", "off")
    yield (
        "epsilon 0.5, the median",
        [median(values) for values in zip(*map(shown, starts), strict=True)],
    )
    yield "epsilon 0.5, the quickest", [*shown(starts[0])]
    yield "epsilon 0.5, the slowest", [*shown(starts[-1])]
    for name, epsilon, method in [
        ("epsilon 0.25, start 0", 0.25, "ours"),
        ("**epsilon 0.5, start 0, systems damped as in the paper**", 0.5, "damped"),
    ]:
        one = row("shuffled_regression", epsilon=epsilon, seed=0, method=method)
        yield name, [*shown(one)]


def memory() -> Iterator[Claim]:
    certified = content("time_to_certified")["rows"]
    yield (
        "all of MNIST to all of Fashion-MNIST, pixels, certified",
        [max(r["peak_mib_over_inputs"] for r in certified)],
    )
    yield (
        "divergence and gradient, 60,000",
        [*row("bench_divergence", n=60000, d=512)["extra_mib_with_gradient"].values()],
    )
    sides = [
        row("reproduce_otdd_scaling", task=task, n=60000, points="features")["sides"]
        for task in ("distance", "flow")
    ]
    yield (
        "distance / flow of 60,000",
        [
            side[name]["peak_mib"] / scale
            for name, scale in (("ours", 1), ("tensorized", 1024), ("geomloss", 1024))
            for side in sides
        ],
    )
    flow = content("bench_flow_cuda")["fixed"]["peak_mib_over_inputs"]
    yield "flow with labels, 60,000", [flow]
    streamed = content("bench_cpu")["memory"]
    matrix = streamed["one_float32_matrix_mib"]
    yield "six passes, 20,000 × 20,000, d", [streamed["peak_mib_over_inputs"], matrix]


def bounds() -> Iterator[Claim]:
    rows = content("bench_bounds_cpu")["rows"]
    largest = [
        100 * max(r["extra_time"] for r in rows if (r["epsilon_relative"] == 0.1) == first)
        for first in (True, False)
    ]
    yield "what proves ours takes", largest
    width = 100 * content("bench_bounds_cpu")["largest_width_over_value"]
    yield "width of the solver bounds, 2,000", [width]
    for name, start in [
        ("cpu", "random problems with exact values: outside / undecided / refused with an error"),
        ("cuda", "the same on a GPU"),
    ]:
        checked = content(f"verify_bounds_{name}")
        status = checked["status"]
        numbers = [len(checked["violations"]), status.get("undecided", 0), status["refused"]]
        yield start, [*numbers, checked["problems"]]
    for name, start in [
        (
            "cuda",
            "present certificate against the one of the runs marked †: "
            "time of a certified divergence",
        ),
        ("cpu", "the same on a processor"),
    ]:
        ratios = [r["ratio_of_times"] for r in content(f"bench_certified_{name}")["rows"]]
        yield start, [min(ratios), max(ratios)]
