"""Multirun: every job on its own, one summary, the highest exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from otdd_flash.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")

NONE = "report=none"


@pytest.fixture
def summary(rows):
    """`summary()` are the lines of the summary of the sweep."""
    return lambda: rows("sweep/summary.csv")


@pytest.mark.slow
def test_a_failing_job_does_not_stop_the_others(command, read, summary):
    ended = command("-m", "source=digits,blobs", "target=blobs", "max_samples=30", NONE)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    failed, done = summary()
    assert list(done) == [
        *("job", "extractor", "cache_dir", "overwrite", "max_samples", "report"),
        *("source", "target", "value", "lower", "upper", "epsilon", "converged", "stopped_by"),
        *("marginal_error", "seconds", "error", "directory"),
    ]
    assert (failed["job"], done["job"]) == ("0", "1")
    # A job without a result says what it was given.
    assert (failed["source"], failed["target"], failed["value"]) == ("digits", "blobs", "")
    assert read(f"sweep/{failed['directory']}/error.json")["error"] == failed["error"]
    assert "digits" in failed["error"]
    result = read("sweep/1/result.json")
    assert float(done["value"]) == result["value"]
    assert [float(done[end]) for end in ("lower", "upper")] == result["bounds"]
    assert (done["converged"], done["error"], done["stopped_by"]) == ("true", "", "tolerance")
    assert float(done["marginal_error"]) == result["marginal_error"]
    assert float(done["seconds"]) == pytest.approx(sum(result["seconds"].values()))
    assert "2 jobs, 1 failed" in ended.err
    assert str(Path("sweep/summary.csv").absolute()) in ended.err


@pytest.mark.slow
def test_a_summary_has_a_column_for_every_override_and_a_picture(command, summary):
    sweep = ("-m", "solver.tolerance=0.1,0.2", "subsample=39", "debias=false", "labels=means")
    ended = command(*sweep, "epsilon_relative=0.5", "source.classes=['0','1']")
    assert ended.code == 0, ended.err
    found = summary()
    given = [(row["solver.tolerance"], row["labels"], row["source.classes"]) for row in found]
    assert given == [(tolerance, "means", "['0','1']") for tolerance in ("0.1", "0.2")]
    for row in found:
        assert float(row["sampling_lower"]) <= float(row["value"]) <= float(row["sampling_upper"])
    with Image.open("sweep/summary.png") as image:
        assert image.size == (1140, 720)
    assert "no picture" not in ended.err


@pytest.mark.slow
def test_why_there_is_no_picture_of_a_sweep_is_said(command):
    for arguments, reason in (
        # The flag may stand after settings.
        (("report=full", "-m", "epsilon=1,-1"), "fewer than two jobs have a value"),
        (("report=table", "-m", "epsilon=1,2"), None),
    ):
        Path("sweep").mkdir(exist_ok=True)
        Path("sweep/summary.png").write_text("of an earlier sweep")
        ended = command(*arguments)
        said = [line for line in ended.err.splitlines() if line.startswith("no picture of the swe")]
        assert said == ([f"no picture of the sweep: {reason}"] if reason else [])
        assert not Path("sweep/summary.png").exists()


@pytest.mark.slow
def test_every_directory_is_self_contained_and_names_its_epsilon(command, summary):
    ended = command("-m", "epsilon=1,3", "report=table")
    assert ended.code == 0
    assert "the rows are not at one epsilon: it goes from 1 to 3" in ended.err
    # Swept on purpose, not a share of each row's own mean cost.
    assert "give epsilon" not in ended.err
    for job in ("0", "1"):
        files = {str(path.relative_to(f"sweep/{job}")) for path in Path(f"sweep/{job}").rglob("*")}
        assert {"result.json", "class_coupling.csv", "class_distances.csv"} <= files
        assert {".hydra/config.yaml", ".hydra/overrides.yaml"} <= files
    assert [float(row["epsilon"]) for row in summary()] == [1, 3]
    # Shares of each row's own mean cost.
    ended = command("-m", "max_samples=20,40", NONE)
    assert "; give epsilon=VALUE to compare them" in ended.err


@pytest.mark.slow
def test_the_highest_code_wins_whatever_the_order(command, summary):
    late = ("solver.max_iterations=1", "solver.tolerance=1e-4", "solver.require_convergence=true")
    assert command("-m", "epsilon=1,-1", *late, NONE).code == 3
    errors = [row["error"] for row in summary()]
    assert "require_convergence" in errors[0]
    assert "epsilon must be finite and not negative" in errors[1]
    # A result that has not converged is still in the table.
    assert summary()[0]["converged"] == "false"


@pytest.mark.slow
def test_a_missing_picture_is_code_4_with_a_result(command, summary, monkeypatch):
    """On a full disk there is no room for error.json either."""

    def refuse(path, *_):
        raise InputError(f"cannot write {path}: No space left on device")

    writing = "otdd_flash.report.distance.projection"
    monkeypatch.setattr(writing, lambda *_: refuse("projection.png"))
    for full in (False, True):
        if full:
            monkeypatch.setattr("otdd_flash.commands.outcome.write_json", refuse)
        assert command("-m", "epsilon=1").code == 4
        (row,) = summary()
        assert float(row["value"]) > 0
        assert ("projection.png" in row["error"]) != full


@pytest.mark.slow
def test_a_stale_result_is_not_taken_for_that_of_a_failed_job(command, summary):
    """Nor where subdirectories have another form."""
    subdir = "deep/${hydra.job.num}"
    for epsilon, code in (("1", 0), ("-1", 2)):
        arguments = ("-m", f"epsilon={epsilon}", f"hydra.sweep.subdir={subdir}", NONE)
        assert command(*arguments).code == code
    assert [(row["directory"], row["value"]) for row in summary()] == [("deep/0", "")]


@pytest.mark.slow
def test_a_damaged_file_of_one_job_costs_no_line_of_others(command, summary):
    damaged = {"result.json": "{", "error.json": '{"a": 1}', ".hydra/overrides.yaml": ": : ["}
    for number, (name, content) in enumerate(damaged.items()):
        old = Path("sweep") / f"old{number}"
        (old / ".hydra").mkdir(parents=True)
        (old / ".hydra" / "overrides.yaml").write_text("[a=1]")
        (old / "error.json").write_text('{"error": "x", "exit_code": 0}')
        (old / name).write_text(content)
    ended = command("-m", "epsilon=1", NONE)
    assert ended.code == 4
    assert "4 jobs, 3 failed" in ended.err
    found = {row["job"]: row for row in summary()}
    assert float(found["0"]["value"]) > 0
    for number, name in enumerate(damaged):
        assert found[f"old{number}"]["error"].startswith("its files cannot be read ("), name
