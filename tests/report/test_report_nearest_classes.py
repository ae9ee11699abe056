"""nearest_classes.csv and its table."""

import csv
import io

from rich.console import Console

from otdd_flash.labels.table import NearestClass
from otdd_flash.report.distance import MOST_ROWS, nearest_table, write_nearest_csv


def rows(sources, targets):
    return [
        NearestClass(side, f"{side[0]} {k}", "cat, [red]", k / 3)
        for side, count in (("source", sources), ("target", targets))
        for k in range(count)
    ]


def shown(given, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(nearest_table(given))
    return console.export_text()


def test_the_file_holds_every_class_at_full_precision(tmp_path):
    write_nearest_csv(rows(2, 30), tmp_path / "n.csv")
    with (tmp_path / "n.csv").open(newline="") as lines:
        header, *body = csv.reader(lines)
    assert header == ["side", "class", "nearest", "squared_distance"]
    assert len(body) == 32
    assert body[1][:3] == ["source", "s 1", "cat, [red]"]
    assert float(body[1][3]) == 1 / 3


def test_both_directions_are_shown_side_by_side_and_many_classes_left_to_the_file():
    text = shown(rows(2, 3))
    for fact in ("source", "nearest target", "target", "nearest source", "cat, [red]", "0.3333"):
        assert fact in text
    (line,) = [line for line in text.splitlines() if "t 1" in line]
    assert "s 1" in line
    assert "s 2" not in text
    assert "more classes" not in text
    text = shown(rows(MOST_ROWS + 5, 3))
    assert f"s {MOST_ROWS - 1} " in text
    assert f"s {MOST_ROWS} " not in text
    assert "5 more classes in nearest_classes.csv" in text
    # Long names fit the terminal.
    text = shown([NearestClass("source", "x" * 200, "y" * 200, 1.0)], 80)
    assert max(map(len, text.splitlines())) <= 80
