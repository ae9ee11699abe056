"""Exit codes and files of `python -m otdd_flash.distance`."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from otdd_flash import DistanceResult
from otdd_flash.commands import compare

TABLES = {"class_coupling.csv", "class_distances.csv", "nearest_classes.csv", "result.json"}
PICTURES = {"class_coupling.png", "class_distances.png", "projection.png"}
TERM_KEYS = {"value", "bounds", "marginal_error", "iterations", "converged"}
RESULT_KEYS = {
    *("value", "bounds", "terms", "epsilon", "marginal_error", "iterations", "passes"),
    *("converged", "stopped_by", "seconds", "n", "m", "d", "classes", "labels"),
    *("lambda_x", "lambda_y", "seed", "fingerprints", "subset_hash", "versions"),
    *("device", "backend", "precision", "config"),
}
PHASES = ["load", "extract", "class_distances", "solve", "other"]
UNFINISHED = ("solver.max_iterations=1", "solver.tolerance=1e-4")
REQUIRED = (*UNFINISHED, "solver.require_convergence=true")


def _files(directory: str = "run") -> set[str]:
    return {path.name for path in Path(directory).iterdir() if path.is_file()}


def _raises(error):
    def run(*_, **__):
        raise error

    return run


@pytest.mark.slow
def test_a_run_writes_everything_and_prints_a_table(command, read):
    ended = command("seed=4", "save_result=true")
    assert ended.code == 0
    assert ended.err == ""
    assert _files() == TABLES | PICTURES | {"result.safetensors"}
    assert str(Path("run").absolute()) in ended.out
    assert "sampling error  │ not measured; subsample=50 gives an interval" in ended.out
    result = read("run/result.json")
    assert set(result) >= RESULT_KEYS
    assert set(result["terms"]) == {"xy", "xx", "yy"}
    assert all(set(term) >= TERM_KEYS for term in result["terms"].values())
    assert list(result["seconds"]) == PHASES
    # Imports were there before; what the phases do not name is named, too.
    assert min(result["seconds"].values()) >= 0
    assert set(result["classes"]) == {"source", "target"}
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]
    assert (result["seed"], result["n"], result["m"]) == (4, 40, 40)
    assert result["config"]["source"]["max_samples"] == 40
    assert result["device"] == "cpu"
    assert DistanceResult.load("run").value == result["value"]


@pytest.mark.slow
def test_not_converged_is_a_warning_and_code_0_or_3_where_it_is_required(command, read, undrawn):
    ended = command(*UNFINISHED)
    assert ended.code == 0
    assert ended.err.startswith("warning: not converged after 1 iterations")
    assert "NOT CONVERGED" in ended.out
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (False, "max_iterations")
    ended = command(*REQUIRED, "report=table")
    assert ended.code == 3
    assert "not converged after 1 iterations in xy" in ended.error
    assert "solver.require_convergence" in ended.error
    assert _files() == TABLES | {"error.json"}
    assert read("run/error.json")["exit_code"] == 3


@pytest.mark.slow
def test_contributions_that_masses_leave_open_warn_or_are_code_3(command, read, monkeypatch):
    """Two classes of as many rows on both sides, far from each other."""
    generator = np.random.default_rng(0)
    labels = np.repeat(["near", "far"], 20)
    for name in "ab":
        x = generator.standard_normal((40, 2)) + 30.0 * (labels == "far")[:, None]
        np.savez(f"{name}.npz", x=x, y=labels)
    arrays = ("source=arrays", "source.path=a.npz", "target=arrays", "target.path=b.npz")
    settings = (*arrays, "epsilon=1", "labels=none", "contributions=true", "report.content=none")
    ended = command(*settings)
    assert ended.code == 0
    assert "contributions are not determined: 20 rows of class" in ended.err
    assert {*read("run/result.json")["contribution_slopes"]} == {"near", "far"}
    # JSON has no infinity for an end that nothing limits.
    with monkeypatch.context() as patched:
        patched.setattr("otdd_flash.derivatives.groups.most_along", lambda *_: float("inf"))
        assert command(*settings).code == 0
    assert read("run/result.json")["contribution_slopes"]["near"] == [None, None]
    ended = command(*settings, "solver.require_convergence=true")
    assert ended.code == 3
    assert "contributions are not determined" in ended.error


def test_bad_input_is_code_2_with_an_error_file_that_a_run_that_succeeds_removes(command, read):
    ended = command("epsilon=-1")
    assert ended.code == 2
    assert ended.out == ""
    record = {"error": ended.error, "type": "InputError", "exit_code": 2}
    assert read("run/error.json") == record
    assert _files() == {"error.json"}
    ended = command("report=none")
    assert ended.code == 0
    assert _files() == {"result.json"}
    # Such a report is the number alone.
    value, bounds = ended.out.strip().split(" ", 1)
    assert float(value) == pytest.approx(read("run/result.json")["value"], rel=1e-2)
    assert bounds.startswith("[")


def disk_full(path):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.slow
def test_a_disk_that_fills_while_pictures_are_drawn_keeps_the_number(command, monkeypatch, read):
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: disk_full(path))
    ended = command("save_result=true", "max_samples=20")
    assert ended.code == 4
    assert "blobs train → blobs test" in ended.out
    assert str(Path("run").absolute()) in ended.out
    *notices, _ = ended.err.splitlines()
    assert len(notices) == len(PICTURES)
    assert all(line.startswith("notice: cannot write ") for line in notices)
    assert all("No space left on device" in line for line in notices)
    assert all(name in ended.error for name in PICTURES)
    assert _files() == TABLES | {"result.safetensors", "error.json"}
    assert DistanceResult.load("run").value == read("run/result.json")["value"]
    assert read("run/error.json")["exit_code"] == 4


@pytest.mark.slow
def test_what_cannot_be_kept_costs_no_number_and_late_convergence_weighs_more(
    command, monkeypatch, undrawn
):
    full = lambda *_, **__: disk_full("result.safetensors")  # noqa: E731
    monkeypatch.setattr(DistanceResult, "save", full)
    ended = command("save_result=true", "report=table")
    assert ended.code == 4
    assert ended.error.startswith("the result was written, but not result.safetensors")
    assert _files() == TABLES | {"error.json"}
    assert command("save_result=true", *REQUIRED).code == 3


@pytest.mark.slow
def test_the_number_is_printed_where_nothing_can_be_written(command, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", lambda path, _: disk_full(path))
    ended = command("report=table")
    assert ended.code == 2
    assert "result.json: No space left on device" in ended.err
    assert "blobs train → blobs test" in ended.out
    assert _files() == set()


@pytest.mark.slow
def test_a_limit_of_the_system_is_code_2_and_a_defect_1_with_its_traceback(
    command, monkeypatch, read
):
    for error, sentence in (
        (OSError(errno.EMFILE, "Too many open files", "a.npz"), "Too many open files at a.npz;"),
        (MemoryError("Unable to allocate 8 GiB"), "memory is short (Unable to allocate 8 GiB)"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; choose another"),
        (ZeroDivisionError("a defect"), ""),
    ):
        monkeypatch.setattr(compare, "dataset_distance", _raises(error))
        ended = command()
        code = 2 if sentence else 1
        assert (ended.code, read("run/error.json")["exit_code"]) == (code, code), error
        assert sentence in ended.err
        assert (len(ended.err.splitlines()) == 1) == bool(sentence), error
        assert ("ZeroDivisionError: a defect" in ended.err) != bool(sentence)
    assert "in run" in read("run/error.json")["traceback"]


@pytest.mark.slow
def test_a_number_whose_reader_has_gone_is_written_all_the_same(command, monkeypatch):
    """As `| head -1` goes: the first line that is printed finds nobody."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        ended = command("report=table")
        assert sys.stdout is output
    assert ended.code == 0
    assert "Broken" not in ended.err
    assert _files() == TABLES


@pytest.mark.slow
def test_an_interruption_is_code_130_and_leaves_what_was_computed(command, monkeypatch):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    # The number is written before it is printed.
    for moment, files in (
        *(("prepare_sides", set()), ("dataset_distance", set())),
        ("summary_table", {"result.json"}),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(compare, moment, interrupted)
            ended = command("epsilon=1")
        assert ended.code == 130, moment
        assert ended.err == "interrupted; what had been written is whole\n"
        assert _files() == files, moment


@pytest.mark.slow
@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_an_output_folder_that_cannot_be_written_is_code_2(command, folder, key):
    (folder / "file").write_text("not a folder")
    for place in ("file", "file/below"):
        ended = command(*(["-m"] if "sweep" in key else []), f"{key}={place}")
        assert ended.code == 2
        assert ended.error.startswith(f"cannot write to {key}={place} (")
        assert f"{key}=DIR" in ended.error
        assert len(ended.err.splitlines()) == 1


@pytest.mark.slow
def test_log_level_info_says_what_auto_became(command):
    ended = command("log_level=info", "epsilon_relative=0.1", "report=none")
    assert ended.code == 0
    for said in (
        *("info: source: blobs train, 40 rows, 5 classes", "info: target: 2 features by identity"),
        "info: class distances by gaussian between 5 + 5 classes",
        *("info: solved on cpu by torch", "info: xy: "),
    ):
        assert said in ended.err
    assert (ended.out + ended.err).count("class distances by gaussian between") == 1
