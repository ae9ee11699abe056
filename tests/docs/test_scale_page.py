"""docs/scale.md: the numbers of its tables are those of the rows of bench_scale."""

from pathlib import Path

import pytest
from benchmark_claims import several_gpus
from result_rows import row, shows

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/scale.md", "README.md")
)


def cells(start):
    """What the row that begins so shows, but for its name and what it says."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start} ")]
    return " | ".join(found.strip("| ").split(" | ")[1:])


def test_a_row_shows_the_numbers_of_its_file():
    for start, values in several_gpus():
        assert shows(cells(start), values), (cells(start), values)


def test_what_is_said_of_four_gpus_is_in_the_file():
    shown = []
    for workload in ("class_table", "flow"):
        one, four = (
            row("bench_scale_cuda", workload=workload, processes=processes) for processes in (1, 4)
        )
        assert four["speed_up"] == pytest.approx(one["seconds"] / four["seconds"])
        shown.append((f"{four['seconds']:.1f} s", f"{four['speed_up']:.2f} times as fast"))
    (table, faster), (flow, flow_faster) = shown
    said = f"took {table}, {faster} as on one, and the flow {flow}, {flow_faster}."
    assert said in " ".join(PAGE.split())


def test_what_is_said_of_a_step_of_the_flow_is_in_the_file():
    rows = [row("bench_scale_cuda", workload="flow", processes=count) for count in (1, 2, 4)]
    steps = [f"{1000 * each['seconds_of_a_step']:.0f} ms" for each in rows]
    assert f"a step takes {steps[0]} on one GPU" in PAGE
    assert f"With two GPUs a step takes {steps[1]}:" in PAGE
    assert f"With four it is {steps[2]}," in PAGE
    assert f"({100 * rows[1]['communication_share']:.0f}% of a flow of four steps" in PAGE


def test_what_is_said_of_one_gpu_and_of_two_is_in_the_file():
    two = row("bench_scale_cuda", workload="four_million", processes=2)
    assert two["points"] == 4_000_000
    assert two["converged"]
    one = row("bench_scale_cuda", workload="imagenet_0.1", processes=1)
    streamed = row("bench_scale_cuda", workload="imagenet_streamed", processes=1)
    held = one["gib_per_process"][0] - one["gib_of_inputs"]
    assert f"{held:.1f} GiB besides the {one['gib_of_inputs']:.1f} GiB of the inputs" in PAGE
    times = streamed["seconds"] / one["seconds"]
    said = f"took {streamed['seconds']:.1f} s, {times:.2f} times as long, and "
    assert f"{said}{streamed['gib_per_process'][0]:.1f} GiB in all" in PAGE
    farthest = {
        name: row("bench_scale_cuda", workload=name, processes=2)["farthest_from_one_process"]
        for name in ("imagenet_0.1", "imagenet_0.01", "imagenet_ring", "class_table", "flow")
    }
    assert "they are within 1e-3 at a value of 89" in PAGE
    assert farthest.pop("imagenet_ring") <= 1e-3
    assert (
        "coordinates of particles are within 5e-5 with two GPUs, and within\n  1.2e-3 with four"
        in PAGE
    )
    assert farthest.pop("flow") <= 5e-5
    four = row("bench_scale_cuda", workload="flow", processes=4)
    assert four["farthest_from_one_process"] <= 1.25e-3
    assert {*farthest.values()} == {0}
    both = one, row("bench_scale_cuda", workload="imagenet_0.1", processes=2)
    held = [f"{max(r['gib_per_process']) - r['gib_of_inputs']:.1f}" for r in both]
    seconds = " / ".join(f"{r['seconds']:.0f}" for r in both)
    assert f"class distances known | one H100 / two | {seconds} s | |" in README
    assert f"a GPU needs {held[0]} GiB (one) or\n{held[1]} GiB (each of two) besides" in README
