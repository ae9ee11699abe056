"""What the long tables of docs/benchmarks.md show: one row for every size."""

from __future__ import annotations

from collections.abc import Iterator

from result_rows import EPSILONS, Claim, at_each_epsilon, row


def small_problems() -> Iterator[Claim]:
    for n, d in [(100, 64), *((n, d) for n in (1000, 5000) for d in (16, 64, 512))]:
        columns = [
            (False, "ours_ms"),
            (True, "ours_ms"),
            (False, "ours_with_gradient_ms"),
            (False, "flash_sinkhorn_ms"),
            (True, "flash_sinkhorn_ms"),
            (False, "geomloss_ms"),
        ]
        yield (
            f"{n:,}, {d}",
            [
                row("bench_small", n=n, d=d, epsilon=epsilon, labels=labels)[key]
                for labels, key in columns
                for epsilon in EPSILONS[:2]
            ],
        )


def convergence() -> Iterator[Claim]:
    names = {"fashion_mnist": "MNIST → Fashion-MNIST", "usps": "MNIST → USPS"}
    kinds = {"pixels": "pixels", "features": "512 features"}
    for n, points, target in [
        (n, p, t) for n in (60000, 10000, 2000) for p in kinds for t in names
    ]:
        size = f"{n:,} and 7,291" if target == "usps" and n > 2000 else f"{n:,}"
        if (n, target, points) == (60000, "fashion_mnist", "pixels"):
            size += " a side"
        keys = {"pair": f"mnist -> {target}", "points": points, "n": n}
        found = at_each_epsilon("bench_convergence_cuda", **keys)
        numbers = [number for ours, times in found for number in (1e3 * ours, times)]
        yield f"{names[target]}, {kinds[points]}, {size}", numbers


def half_steps() -> Iterator[Claim]:
    sides = ("ours_labels", "flash_sinkhorn")
    for d in (784, 512, 128, 64):
        r = row("bench_half_step", n=60000, d=d)
        times = [r["ms_per_half_step"][side] for side in sides]
        yield str(d), [*times, r["times_faster_than_flash_sinkhorn"], 100 * r["share_of_cublas"]]
    r = row("bench_half_step", n=60000, d=512)
    times = [r["from_idle_ms_per_half_step"][side] for side in sides]
    ratio = r["from_idle_times_faster_than_flash_sinkhorn"]
    yield "512, one call of ten iterations from idle", [*times, ratio]
    rows = [row("bench_half_step", n=n, d=64) for n in (1000, 2000, 5000)]
    spans = [[1e3 * r["ms_per_half_step"][side] for r in rows] for side in sides]
    spans.append([r["times_faster_than_flash_sinkhorn"] for r in rows])
    yield "64, 1,000 to 5,000 points", [end(span) for span in spans for end in (min, max)]


def matrices() -> Iterator[Claim]:
    methods = ("ours", "POT sinkhorn_log", "PyTorch", "OTT-JAX")
    for n in (256, 1024, 2048, 4096, 8192, 16384):
        yield (
            f"{n:,}",
            [
                1e3 * row("bench_matrix_cuda", n=n, epsilon=epsilon, method=method)["seconds"]
                for method in methods
                for epsilon in EPSILONS
            ],
        )


def balanced() -> Iterator[Claim]:
    keys = {"iterations": 20, "backward": False}
    others = ("torch.compile", "liger-kernel", "POT", "OTT-JAX")
    for n, count in [(4, 2**24), (4, 2**20), (4, 2**10), (8, 2**18), (16, 2**16)]:
        ours = row("bench_batched_cuda", method="ours", n=n, B=count, **keys)
        rows = [
            row("bench_batched_cuda", method=method, n=n, B=count, **keys)
            for method in others
            if method != "liger-kernel" or n == 4
        ]
        called = [r["called"]["ms"] for r in rows]
        yield f"{n}, {count:,}", [ours["in_graph"]["ms"], ours["called"]["ms"], *called]
