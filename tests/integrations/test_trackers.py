"""`log=` hands numbers with bounds, settings and pictures to the real trackers, offline."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from otdd_flash.commands.outcome import Outcome
from otdd_flash.commands.start import run_command
from otdd_flash.errors import InputError
from otdd_flash.integrations import tracking
from otdd_flash.integrations.tracking import TrackedRun, check_tracker, finite, track

INSTALLED = [
    name for name, package in tracking.TRACKERS.items() if importlib.util.find_spec(package)
]
RUN = ("report=none", "max_samples=40", "extractor=identity")
# Where a command's entry point is, if not in the module of its name.
MODULES = {"study": "study.__main__"}
PAIR = ("source=blobs", "target=blobs")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        name not in INSTALLED, reason=f"{name} is not installed; the extra integrations has it"
    )


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    Image.new("RGB", (8, 6), (200, 30, 30)).save(tmp_path / "projection.png")
    return TrackedRun(
        "digits → digits",
        tmp_path,
        {"epsilon": 0.1, "solver": {"tolerance": None}},
        {"value": 6.118, "lower": 6.117, "upper": 6.119, "otdd/a → b": 2.0},
        {"divergence": [(0, 6.0), (1, 5.0)]},
    )


def test_unknown_and_missing_trackers_are_refused(monkeypatch):
    check_tracker(None)
    with pytest.raises(InputError, match=r"unknown log 'tensorbord'.*tensorboard"):
        check_tracker("tensorbord")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"needs the package wandb: pip install .*integrations"):
        check_tracker("wandb")


def test_settings_are_flat_and_numbers_finite(run):
    assert run.flat_config == {"epsilon": 0.1, "solver.tolerance": None}
    assert finite({"a": 1, "b": None, "c": float("nan"), "d": float("inf")}) == {"a": 1.0}


@needs("tensorboard")
def test_tensorboard_reads_what_was_written(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", run)
    events = EventAccumulator(str(run.directory / "tensorboard")).Reload()
    assert events.Scalars("value")[0].value == pytest.approx(6.118)
    assert [(e.step, e.value) for e in events.Scalars("divergence")] == [(0, 6.0), (1, 5.0)]
    assert events.Tags()["images"] == ["projection"]
    assert (events.Images("projection")[0].width, events.Images("projection")[0].height) == (8, 6)


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_reads_what_was_written(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    track("mlflow", run)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.directory / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("otdd-flash")
    (written,) = client.search_runs([experiment.experiment_id])
    assert written.data.metrics["lower"] == 6.117
    assert written.data.metrics["otdd/a _ b"] == 2.0
    assert written.data.params == {"epsilon": "0.1", "solver.tolerance": "None"}
    steps = client.get_metric_history(written.info.run_id, "divergence")
    assert [(metric.step, metric.value) for metric in steps] == [(0, 6.0), (1, 5.0)]
    assert [file.path for file in client.list_artifacts(written.info.run_id)] == ["projection.png"]


@pytest.mark.slow
@needs("wandb")
def test_wandb_writes_an_offline_run(run):
    track("wandb", run)
    (offline,) = (run.directory / "wandb").glob("offline-run-*")
    (written,) = offline.glob("*.wandb")
    content = written.read_bytes()
    assert all(word in content for word in (b"divergence", b"upper", b"solver.tolerance"))
    assert list((offline / "files" / "media" / "images").glob("projection_*.png"))


@needs("tensorboard")
@pytest.mark.parametrize(
    ("command", "more", "names"),
    [
        ("distance", (), {"value", "lower", "upper"}),
        ("flow", ("flow.steps=2",), {"value/after", "upper/before", "divergence", "lower"}),
        (
            "study",
            (
                "study.tasks=[{name: blobs, as: one}, {name: blobs, seed: 1, as: two}]",
                *("transfer=null", "measures=[otdd]", "study.workers=1"),
            ),
            {"otdd/one to two", "otdd/one to two/lower", "otdd/one to two/upper"},
        ),
    ],
)
@pytest.mark.slow
def test_commands_log(command, more, names, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = RUN if command == "study" else (*RUN, *PAIR)
    folders = ("log=tensorboard", "cache_dir=null", f"hydra.run.dir={tmp_path}/run")
    monkeypatch.setattr(sys, "argv", ["command", *settings, *more, *folders])
    monkeypatch.setattr(Outcome, "exit_code", 0)
    with pytest.raises(SystemExit) as ended:
        run_command(import_module(f"otdd_flash.{MODULES.get(command, command)}").main)
    assert not ended.value.code
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert names <= set(events.Tags()["scalars"])
    if command == "distance":
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert events.Scalars("value")[0].value == pytest.approx(result["value"])


def test_nothing_of_this_is_imported_with_the_package():
    code = (
        "import sys, otdd_flash, otdd_flash.integrations.tracking; "
        "print([n for n in ('torchmetrics', 'tensorboard', 'wandb', 'mlflow', 'sklearn') "
        "if n in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
