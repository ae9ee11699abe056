import io
import math
import random

from rich.console import Console

from otdd_flash.report.distance import summary_table
from otdd_flash.shown import interval

SUMMARY = {
    "value": 12.345678,
    "bounds": [12.3401, 12.3512],
    "epsilon": 0.1,
    "marginal_error": 7e-4,
    "tolerance": 1e-3,
    "iterations": 212,
    "converged": True,
    "stopped_by": "tolerance",
    "seconds": {"load": 0.25, "extract": 1.5, "class_distances": 0.5, "solve": 12.25, "report": 1},
    "n": 5000,
    "m": 7291,
    "d": 784,
    "classes": {"source": 10, "target": ["a", "b", "c"]},
    "labels": "gaussian",
    "device": "cpu",
    "backend": "torch",
    "precision": "fast",
    "source": "MNIST [train]",
    "target": "USPS",
}


def shown(**changes):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(SUMMARY | changes))
    return console.export_text()


def test_the_table_says_what_matters():
    text = shown()
    for fact in (
        "MNIST [train] → USPS",
        "12.346 [12.340, 12.352] (solver bounds)",
        "sampling error  │ not measured; subsample=50 gives an interval",
        "5000 × 7291, 784 features",
        "10 × 3",
        "gaussian",
        "0.0007 ≤ 0.001",
        "212",
        "16 (load 0.25",
        "solve 12",
        "cpu, torch, fast",
    ):
        assert fact in text
    assert "NOT CONVERGED" not in text


def test_what_stopped_a_solve_is_said_where_it_is_not_the_tolerance():
    assert "stopped by" not in shown()
    for changes, there, not_there in (
        (
            {"converged": False, "stopped_by": "max_iterations", "marginal_error": 0.02},
            ["NOT CONVERGED", "stopped by max_iterations", "0.02 > 0.001"],
            "yes",
        ),
        (
            {"stopped_by": "bound_width", "marginal_error": 0.02, "tolerance": None},
            ["yes, stopped by bound_width", "0.02"],
            "> 0.001",
        ),
        (
            {"stopped_by": "rounding", "marginal_error": 0.0019, "tolerance": 0.0021},
            ["yes, stopped by rounding", "0.0019 ≤ 0.0021"],
            "NOT",
        ),
        (
            {"converged": False, "stopped_by": "schedule", "schedule": "geomloss"},
            ["the value is geomloss's, the solver bounds hold"],
            "only solver bounds",
        ),
    ):
        text = shown(**changes)
        assert all(fact in text for fact in there), text
        assert not_there not in text


def test_a_table_says_where_sampling_error_was_not_measured():
    need = "not measured; subsamples need more rows"
    gives = "not measured; subsample=50 gives an interval"
    sampled = {"lower": 2.751, "upper": 9.003, "level": 0.95, "count": 50, "size": [22, 20]}
    for changes, row in (
        ({"n": 20, "m": 5000}, f"{need}, over two of each class"),
        ({"n": 21, "m": 5000}, gives),
        ({"n": 20, "labels": "none"}, gives),
        ({"n": 2, "labels": "none"}, need),
        ({"n": 10, "m": 21, "labels": "none"}, "subsample=50"),
        ({"value": 0.0, "bounds": [0.0, 0.0]}, None),
        (
            {"subsample": {**sampled, "identical": False}},
            "12.3 [2.7, 9.1] (50 subsamples of 22 × 20)",
        ),
    ):
        text = shown(**changes)
        measured = row is None or "subsamples of" in row
        assert ("sampling error" not in text) == measured, changes
        assert row is None or row in text, changes


def test_an_interval_shows_the_digits_its_bounds_support_and_contains_them():
    for numbers, text in (
        ((0.0, 0.0, 0.0), "0 [0, 0]"),
        ((2.5, 2.5, 2.5), "2.50000 [2.50000, 2.50000]"),
        ((10.0, -5.0, 40.0), "10.0 [-5.0, 40.0]"),
        ((1.5e-9, 1.4e-9, 1.6e-9), "1.50e-9 [1.40e-9, 1.60e-9]"),
        ((1e-4, -1e-7, 2e-4), "0.000100 [-0.000001, 0.000200]"),
        ((123456.7, 123450.2, 123460.9), "123457 [123450, 123461]"),
        ((math.nan, 0.0, math.inf), "nan [0, inf]"),
    ):
        assert interval(*numbers) == text
    draw = random.Random(0)
    for _ in range(500):
        value = draw.uniform(-1, 1) * 10.0 ** draw.uniform(-12, 12)
        width = abs(value) * 10.0 ** draw.uniform(-12, 2)
        lower, upper = value - draw.random() * width, value + draw.random() * width
        low, high = interval(value, lower, upper).split(" ", 1)[1].strip("[]").split(", ")
        assert float(low) <= lower
        assert upper <= float(high)
        assert float(high) - float(low) <= 1.5 * (upper - lower) + 2e-5 * max(
            abs(lower), abs(upper)
        )
