"""All files of a distance's report, whatever style, backend and fonts there are."""

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError, MissingFileNotice
from otdd_flash.labels.table import NearestClass
from otdd_flash.report import distance as writing
from otdd_flash.report.distance import write_nearest_csv, write_report
from otdd_flash.report.figures import page as fonts
from otdd_flash.report.flow.writing import write_flow_report
from otdd_flash.samples import LabeledSamples

COUPLING = {"class_coupling.csv", "class_coupling.png"}
ALL = {"class_distances.csv", "class_distances.png", "nearest_classes.csv", *COUPLING}
ALL |= {"projection.png"}


def test_reports_are_of_the_results_themselves():
    """Not of classes that say once more what these hold."""
    assert get_type_hints(write_report)["result"] == otdd.DistanceResult
    assert get_type_hints(write_flow_report)["result"] == otdd.FlowResult
    assert get_type_hints(write_nearest_csv)["rows"] == Sequence[NearestClass]


@dataclass(frozen=True)
class Table:
    full: Tensor

    def nearest(self):
        near = [("source", "a,b", "d", 0.1), ("target", "d", "a,b", 1 / 3)]
        return [NearestClass(*each) for each in near]


@dataclass(frozen=True)
class Result:
    class_names: tuple[tuple[str, ...], tuple[str, ...]]
    coupling: Tensor
    class_distances: Table
    method: str = "gaussian"
    labelled: bool = True

    @property
    def source(self):
        return samples(self.class_names[0], self.labelled)

    @property
    def target(self):
        return samples(self.class_names[1], self.labelled)

    def class_coupling(self):
        return self.coupling


def samples(classes, labelled):
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % len(classes) if labelled else None
    return LabeledSamples(features, labels, classes if labelled else ())


def result(names=(("a,b", "c"), ("a,b", "d", "e")), full=None, **more):
    n, m = map(len, names)
    coupling = torch.full((n, m), 1 / (n * m), dtype=torch.float64)
    full = torch.arange(1.0 * (n + m) ** 2).reshape(n + m, n + m) if full is None else full
    return Result(names, coupling, Table(full.double()), **more)


def listing(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_report_has_all_its_files_whatever_the_users_style(tmp_path):
    """Which may ask for LaTeX, and is afterwards what it was."""
    import matplotlib

    given = result()
    written = write_report(given, tmp_path / "run").written
    assert {path.name for path in written} == listing(tmp_path / "run") == ALL
    with (tmp_path / "run" / "class_distances.csv").open(newline="") as lines:
        header, *body = csv.reader(lines)
    assert header == ["class", "source:a,b", "source:c", "target:a,b", "target:d", "target:e"]
    assert [
        [float(cell) for cell in row[1:]] for row in body
    ] == given.class_distances.full.tolist()
    nearest = (tmp_path / "run" / "nearest_classes.csv").read_text()
    assert nearest.splitlines()[1:] == ['source,"a,b",d,0.1', 'target,d,"a,b",0.3333333333333333']
    with (tmp_path / "run" / "class_coupling.csv").open(newline="") as lines:
        assert [row[0] for row in csv.reader(lines)] == ["source\\target", "a,b", "c"]
    theirs = {"text.usetex": True, "font.size": 30.0, "savefig.bbox": "tight"}
    with matplotlib.rc_context(theirs):
        report = write_report(given, tmp_path / "styled")
        assert {key: matplotlib.rcParams[key] for key in theirs} == theirs
    for path in report.written:
        assert path.read_bytes() == (tmp_path / "run" / path.name).read_bytes(), path.name
    # Without labels or class distances there are fewer files.
    one = result((("all",), ("all",)), method="none", labelled=False)
    written = write_report(one, tmp_path / "unlabelled").written
    assert [path.name for path in written] == ["projection.png"]
    assert listing(tmp_path / "unlabelled") == {"projection.png"}
    write_report(result(method="none"), tmp_path / "none")
    assert listing(tmp_path / "none") == {"projection.png", *COUPLING}


def test_fonts_that_cannot_be_read_cost_no_table(tmp_path, monkeypatch):
    def unreadable(*_):
        raise OSError("no fonts")

    monkeypatch.setattr(fonts, "_for_characters", unreadable)
    with pytest.warns(MissingFileNotice, match="no fonts"):
        report = write_report(result(), tmp_path)
    tables = {name for name in ALL if name.endswith(".csv")}
    assert tables <= {path.name for path in report.written}


BACKENDS = """
import os, sys
from otdd_flash.report.figures.page import new_figure, save_picture
assert "matplotlib" not in sys.modules
for named in ("banana", "module://nosuch.inline", "svg"):
    if not (pid := os.fork()):
        os.environ["MPLBACKEND"] = named
        save_picture(new_figure(), f"{named[:3]}.png")
        import matplotlib
        print(named, matplotlib.rcParams["backend"], flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, named
"""


@pytest.mark.slow
def test_pictures_are_drawn_whatever_backend_the_environment_names(tmp_path):
    """And one that there is stays the user's."""
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    command, pipes = [sys.executable, "-c", BACKENDS], {"capture_output": True, "text": True}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, **pipes, check=False)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert found["svg"] == "svg"
    assert found["module://nosuch.inline"].startswith("module")
    assert listing(tmp_path) == {"ban.png", "mod.png", "svg.png"}
    assert all(path.stat().st_size for path in tmp_path.iterdir())


def test_pictures_are_in_the_order_asked_for_and_tables_are_not(tmp_path, monkeypatch):
    drawn = {}
    for name in ("draw_class_distances", "draw_class_coupling"):
        monkeypatch.setattr(
            writing, name, lambda *_, name=name, orders: drawn.setdefault(name, orders)
        )
    monkeypatch.setattr(writing, "projection", lambda *_, **__: None)
    points = torch.tensor([[5.0], [0.0], [4.0], [0.5], [4.5], [1.0]]).double()
    given = result((("a", "b", "c"), ("d", "e", "f")), torch.cdist(points, points) ** 2)
    write_report(given, tmp_path, order="hierarchical")
    assert drawn["draw_class_distances"] in ([[1, 2, 0], [0, 2, 1]], [[0, 2, 1], [1, 2, 0]])
    assert drawn["draw_class_coupling"] == drawn["draw_class_distances"]
    assert (tmp_path / "class_distances.csv").read_text().startswith("class,source:a,source:b,")
    with pytest.raises(InputError, match=r"unknown report.order 'best'; choose one of: given"):
        write_report(given, tmp_path, order="best")
