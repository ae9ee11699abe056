"""docs/scale.md: the numbers of its table of two GPUs are those of the rows of bench_scale."""

from pathlib import Path

import pytest
from result_rows import row, shows

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/scale.md", "README.md")
)
BASELINES = {name: name for name in ("imagenet_0.1", "imagenet_0.01", "class_table", "flow")}
BASELINES["imagenet_ring"] = "imagenet_0.1"


def cells(workload):
    """What the row of a workload shows, but for its name and what it says."""
    starts = f"| `{workload}`: "
    (found,) = [line for line in PAGE.splitlines() if line.startswith(starts)]
    return " | ".join(found.strip("| ").split(" | ")[1:])


@pytest.mark.parametrize(("workload", "baseline"), BASELINES.items())
def test_a_row_shows_the_numbers_of_its_file(workload, baseline):
    one, two = (
        row("bench_scale_cuda", workload=name, processes=processes)
        for name, processes in ((baseline, 1), (workload, 2))
    )
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])
    values = [
        *(one["seconds"], two["seconds"], two["speed_up"]),
        100 * two["communication_share"],
        two["bytes_moved"] / 1e9,
        *(max(found["gib_per_process"]) for found in (one, two)),
    ]
    assert shows(cells(workload), values), (cells(workload), values)


def test_four_million_points_a_side_are_those_of_the_file():
    two = row("bench_scale_cuda", workload="four_million", processes=2)
    assert two["points"] == 4_000_000
    assert two["converged"]
    moved = [100 * two["communication_share"], two["bytes_moved"] / 1e9]
    values = [two["seconds"], *moved, max(two["gib_per_process"])]
    assert shows(cells("four_million"), values), values


def test_streamed_points_and_memory_are_those_of_the_file():
    one = row("bench_scale_cuda", workload="imagenet_0.1", processes=1)
    streamed = row("bench_scale_cuda", workload="imagenet_streamed", processes=1)
    held = one["gib_per_process"][0] - one["gib_of_inputs"]
    assert f"{held:.1f} GiB besides the {one['gib_of_inputs']:.1f} GiB of the inputs" in PAGE
    times = streamed["seconds"] / one["seconds"]
    memory = streamed["gib_per_process"][0]
    assert (
        f"took {streamed['seconds']:.1f} s, {times:.2f} times as long, and {memory:.1f} GiB in all"
    ) in PAGE


def test_class_distances_and_particles_are_as_near_to_those_of_one_gpu_as_said():
    farthest = {
        workload: row("bench_scale_cuda", workload=workload, processes=2)[
            "farthest_from_one_process"
        ]
        for workload in ("imagenet_0.1", "imagenet_0.01", "class_table", "imagenet_ring", "flow")
    }
    ring, flow = farthest.pop("imagenet_ring"), farthest.pop("flow")
    assert set(farthest.values()) == {0}
    assert "they are within 1e-3 at a value of 89" in PAGE
    assert ring <= 1e-3
    assert "within 5e-5 after the flow" in PAGE
    assert flow <= 5e-5


def test_the_readme_says_what_one_gpu_and_two_take():
    both = [row("bench_scale_cuda", workload="imagenet_0.1", processes=count) for count in (1, 2)]
    held = [f"{max(r['gib_per_process']) - r['gib_of_inputs']:.1f}" for r in both]
    seconds = " / ".join(f"{r['seconds']:.0f}" for r in both)
    assert f"class distances known | one H100 / two | {seconds} s | |" in README
    assert f"a GPU needs {held[0]} GiB (one) or\n{held[1]} GiB (each of two) besides" in README
