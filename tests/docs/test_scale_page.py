"""docs/scale.md: the numbers of its tables are those of the rows of bench_scale."""

from pathlib import Path

import pytest
from result_rows import row, shows

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/scale.md", "README.md")
)
BASELINES = {"imagenet_0.1": "imagenet_0.1", "imagenet_0.01": "imagenet_0.01"}
BASELINES["imagenet_ring"] = "imagenet_0.1"
ON_FOUR = "class_table", "flow"


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


@pytest.mark.parametrize("workload", ON_FOUR)
def test_a_row_of_four_shows_the_numbers_of_its_file(workload):
    one, two, four = (
        row("bench_scale_cuda", workload=workload, processes=processes) for processes in (1, 2, 4)
    )
    for several in (two, four):
        assert several["speed_up"] == pytest.approx(one["seconds"] / several["seconds"])
    values = [
        *(one["seconds"], two["seconds"], two["speed_up"], four["seconds"], four["speed_up"]),
        *(found["bytes_moved"] / 1e9 for found in (two, four)),
        *(max(found["gib_per_process"]) for found in (one, two, four)),
    ]
    assert shows(cells(workload), values), (cells(workload), values)


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
    shares = [100 * two["communication_share"], two["bytes_moved"] / 1e9]
    values = [two["seconds"], *shares, max(two["gib_per_process"])]
    assert shows(cells("four_million"), values), values
    one = row("bench_scale_cuda", workload="imagenet_0.1", processes=1)
    streamed = row("bench_scale_cuda", workload="imagenet_streamed", processes=1)
    held = one["gib_per_process"][0] - one["gib_of_inputs"]
    assert f"{held:.1f} GiB besides the {one['gib_of_inputs']:.1f} GiB of the inputs" in PAGE
    times = streamed["seconds"] / one["seconds"]
    said = f"took {streamed['seconds']:.1f} s, {times:.2f} times as long, and "
    assert f"{said}{streamed['gib_per_process'][0]:.1f} GiB in all" in PAGE
    farthest = {
        name: row("bench_scale_cuda", workload=name, processes=2)["farthest_from_one_process"]
        for name in (*BASELINES, *ON_FOUR)
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
