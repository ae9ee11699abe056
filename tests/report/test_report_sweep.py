"""A multirun's jobs as a table, and their values against what was swept."""

import csv

import pytest

from otdd_flash.report.sweep import axes_of, draw_sweep, summary_csv


def job(number, value=1.0, **overrides):
    keys = {key.replace("__", "."): given for key, given in overrides.items()}
    row = {"job": str(number), "directory": str(number), "overrides": keys}
    if value is None:
        return row | {"error": "epsilon must be positive"}
    return row | {
        **{"source": "a", "target": "b", "value": value, "lower": value - 0.1},
        **{"upper": value + 0.2, "epsilon": 0.3, "converged": number != 1},
    }


def test_what_was_given_stands_where_a_job_has_no_result(tmp_path):
    jobs = [job(0, epsilon=0.30001, seed=1, name="=1+1"), job(1, None, epsilon=-1, labels="means")]
    summary_csv(jobs, tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(encoding="utf-8", newline="") as file:
        one, other = csv.DictReader(file)
    assert [*one][:4] == ["job", "seed", "name", "labels"]
    assert (one["epsilon"], one["seed"], one["name"], one["labels"]) == ("0.3", "1", "'=1+1", "")
    assert (other["epsilon"], other["labels"], other["value"]) == ("-1", "means", "")
    assert "directory" in one
    assert one["converged"] == "true"


GRID = [
    job(i, 1.0 + i, epsilon=e, solver__tolerance=t)
    for i, (e, t) in enumerate([(0.1, 1e-2), (0.1, 1e-3), (1, 1e-2), (1, 1e-3)])
]


SWEPT = [
    ([job(0, epsilon=0.1, seed=3), job(1, epsilon=1, seed=3)], ("epsilon", None)),
    (GRID, ("epsilon", "solver.tolerance")),
    ([job(0, labels="means", epsilon=1), job(1, labels="exact", epsilon=2)], ("epsilon", "labels")),
    ([job(0, labels="means"), job(1, labels="exact")], "labels is swept, which is no number"),
    ([job(0, debias=True), job(1, debias=False)], "debias is swept, which is no number"),
    ([job(0, seed=1), job(1, None, seed=2)], "fewer than two jobs have a value"),
    ([job(0, seed=1), job(1, seed=1)], "nothing is swept, which is no number"),
    # Given to one of the jobs only, as in a folder that holds two sweeps.
    ([job(0, seed=1), job(1)], "seed is swept, which is no number"),
    (
        [job(0, a=1, b=1, c=1), job(1, a=2, b=2, c=2)],
        "3 settings are swept (a, b, c), and it shows one or two",
    ),
    ([job(i, seed=i % 2, k=i) for i in range(13)], "k takes 13 values, and it shows 12 lines"),
]


def test_the_picture_is_of_one_or_two_settings_of_which_one_is_a_number():
    for jobs, expected in SWEPT:
        found = axes_of(jobs)
        begins = isinstance(expected, str) and isinstance(found, str)
        assert found.startswith(expected) if begins else found == expected, expected


@pytest.mark.parametrize("sampled", [False, True])
def test_values_are_drawn_with_their_intervals_a_line_for_each_second_value(sampled, figures):
    more = {"sampling_lower": 0.5, "sampling_upper": 9.0} if sampled else {}
    draw_sweep([one | more for one in GRID], "epsilon", "solver.tolerance", None)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    # The smaller of the second numbers comes first.
    first, second = (f"solver.tolerance={value}" for value in ("0.001", "0.01"))
    assert [label for label in lines if label in (first, second)] == [first, second]
    assert lines[first].get_xydata().tolist() == [[0.1, 2.0], [1.0, 4.0]]
    assert lines[second].get_xydata().tolist() == [[0.1, 1.0], [1.0, 3.0]]
    ends = sorted(tuple(bar.get_segments()[0][:, 1].tolist()) for bar in axes.collections)
    bounds = [(one["lower"], one["upper"]) for one in GRID]
    assert ends == ([(0.5, 9.0)] * 4 if sampled else bounds)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[-1] == ("sampling interval" if sampled else "solver bounds")
    assert "not converged: only the bounds hold" in texts
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "epsilon"
    assert [text.get_text() for text in figures[0].texts] == ["a → b"]
