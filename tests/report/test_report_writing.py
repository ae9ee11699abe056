from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_type_hints

import matplotlib
import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError, MissingFileNotice
from otdd_flash.labels.table import NearestClass
from otdd_flash.report.distance import writing
from otdd_flash.report.distance.nearest_classes import write_nearest_csv
from otdd_flash.report.distance.writing import write_report
from otdd_flash.report.figures import fonts
from otdd_flash.report.flow.writing import write_flow_report
from otdd_flash.samples import LabeledSamples

ALL = {
    "class_distances.csv",
    "class_distances.png",
    "class_coupling.csv",
    "class_coupling.png",
    "nearest_classes.csv",
    "projection.png",
}


@pytest.mark.parametrize(
    ("write", "argument", "kind"),
    [
        (write_report, "result", otdd.DistanceResult),
        (write_flow_report, "result", otdd.FlowResult),
        (write_nearest_csv, "rows", Sequence[NearestClass]),
    ],
)
def test_reports_are_of_the_results_themselves(write, argument, kind):
    """Not of classes that say once more what these hold."""
    assert get_type_hints(write)[argument] == kind


@dataclass(frozen=True)
class Near:
    side: str
    name: str
    nearest: str
    distance: float


@dataclass(frozen=True)
class Table:
    full: Tensor

    def nearest(self):
        return [Near("source", "a,b", "d", 0.1), Near("target", "d", "a,b", 1 / 3)]


@dataclass(frozen=True)
class Result:
    source: LabeledSamples
    target: LabeledSamples
    class_names: tuple[tuple[str, ...], tuple[str, ...]]
    class_distances: Table
    coupling: Tensor
    method: str = "gaussian"

    def class_coupling(self):
        return self.coupling


def samples(classes):
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    labels = None if classes is None else torch.arange(12) % len(classes)
    return LabeledSamples(features, labels, classes or ())


def test_a_report_has_all_its_files(tmp_path):
    names = ("a,b", "c"), ("a,b", "d", "e")
    full, coupling = torch.rand(5, 5).double(), torch.full((2, 3), 1 / 6, dtype=torch.float64)
    result = Result(samples(names[0]), samples(names[1]), names, Table(full), coupling)
    written = write_report(result, tmp_path / "run").written
    assert {path.name for path in written} == ALL
    assert {path.name for path in (tmp_path / "run").iterdir()} == ALL
    with (tmp_path / "run" / "class_distances.csv").open(newline="") as lines:
        header, *body = csv.reader(lines)
    assert header == ["class", "source:a,b", "source:c", "target:a,b", "target:d", "target:e"]
    assert [[float(cell) for cell in row[1:]] for row in body] == full.tolist()
    nearest = (tmp_path / "run" / "nearest_classes.csv").read_text()
    assert nearest.splitlines()[1:] == ['source,"a,b",d,0.1', 'target,d,"a,b",0.3333333333333333']
    with (tmp_path / "run" / "class_coupling.csv").open(newline="") as lines:
        assert [row[0] for row in csv.reader(lines)] == ["source\\target", "a,b", "c"]


def few_classes():
    names, coupling = (("a", "b"), ("c", "d")), torch.full((2, 2), 0.25, dtype=torch.float64)
    full = torch.arange(16).reshape(4, 4).double()
    return Result(samples(names[0]), samples(names[1]), names, Table(full), coupling)


def test_pictures_do_not_depend_on_the_users_style(tmp_path):
    """Which may ask for LaTeX, and is afterwards what it was."""
    write_report(few_classes(), tmp_path / "plain")
    theirs = {"text.usetex": True, "font.size": 30.0, "savefig.bbox": "tight"}
    with matplotlib.rc_context(theirs):
        report = write_report(few_classes(), tmp_path / "styled")
        assert {key: matplotlib.rcParams[key] for key in theirs} == theirs
    assert {path.name for path in report.written} == ALL
    for path in report.written:
        assert path.read_bytes() == (tmp_path / "plain" / path.name).read_bytes(), path.name


def test_fonts_that_cannot_be_read_cost_no_table(tmp_path, monkeypatch):
    def unreadable(*_):
        raise OSError("no fonts")

    monkeypatch.setattr(fonts, "_for_characters", unreadable)
    with pytest.warns(MissingFileNotice, match="no fonts"):
        report = write_report(few_classes(), tmp_path)
    tables = {name for name in ALL if name.endswith(".csv")}
    assert tables <= {path.name for path in report.written}


BACKEND = """
from otdd_flash.report.figures.page import new_figure, save_picture
save_picture(new_figure(), "figure.png")
import matplotlib
print(matplotlib.rcParams["backend"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "backend"), [("banana", ""), ("module://nosuch.inline", "module"), ("svg", "svg")]
)
def test_pictures_are_drawn_whatever_backend_the_environment_names(tmp_path, named, backend):
    """And one that there is stays the user's."""
    ended = subprocess.run(
        [sys.executable, "-c", BACKEND],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": named},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert ended.stdout.strip().startswith(backend)


def test_pictures_are_in_the_order_asked_for_and_tables_are_not(tmp_path, monkeypatch):
    drawn = {}
    for name in ("draw_class_distances", "draw_class_coupling"):
        monkeypatch.setattr(
            writing, name, lambda *_, name=name, orders: drawn.setdefault(name, orders)
        )
    points = torch.tensor([[5.0], [0.0], [4.0], [0.5], [4.5], [1.0]]).double()
    names = ("a", "b", "c"), ("d", "e", "f")
    result = Result(
        samples(names[0]),
        samples(names[1]),
        names,
        Table(torch.cdist(points, points) ** 2),
        torch.full((3, 3), 1 / 9, dtype=torch.float64),
    )
    write_report(result, tmp_path, order="hierarchical")
    assert drawn["draw_class_distances"] in ([[1, 2, 0], [0, 2, 1]], [[0, 2, 1], [1, 2, 0]])
    assert drawn["draw_class_coupling"] == drawn["draw_class_distances"]
    assert (tmp_path / "class_distances.csv").read_text().startswith("class,source:a,source:b,")
    with pytest.raises(InputError, match=r"unknown report.order 'best'; choose one of: given"):
        write_report(result, tmp_path, order="best")


def test_unlabelled_data_have_only_a_projection(tmp_path):
    one = (("all",), ("all",))
    result = Result(
        samples(None), samples(None), one, Table(torch.zeros(2, 2)), torch.ones(1, 1), "none"
    )
    assert [path.name for path in write_report(result, tmp_path).written] == ["projection.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["projection.png"]


def test_without_class_distances_labelled_data_still_have_a_coupling(tmp_path):
    names, coupling = (("a", "b"), ("c", "d")), torch.full((2, 2), 0.25, dtype=torch.float64)
    result = Result(
        samples(names[0]), samples(names[1]), names, Table(torch.zeros(4, 4)), coupling, "none"
    )
    write_report(result, tmp_path)
    kept = {"projection.png", "class_coupling.csv", "class_coupling.png"}
    assert {path.name for path in tmp_path.iterdir()} == kept
