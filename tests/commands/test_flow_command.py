"""The flow command: what it writes, how it is interrupted and goes on, what it refuses."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.commands import adapt
from otdd_flash.commands.adapt import FlowSettings
from otdd_flash.commands.settings import parse
from otdd_flash.flow import main as flow_main
from otdd_flash.flows.stepping import Stepper
from otdd_flash.report.flow import writing as flow_writing

TABLES = {"adapted.npz", "adapted", "metrics.csv", "trajectory.npz", "result.json"}
TABLES |= {"checkpoint.json", "checkpoint"}
PICTURES = {"objective.png", "paths.png"}
IMAGES = {"images.png", "flow.gif"}
DIGITS = ("source=digits", "target=digits", "target.split=test", "extractor=pixels")


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> None:
    """Pictures are drawn by the one test that looks at them."""
    if request.node.name != "test_a_run_writes_everything":
        request.getfixturevalue("undrawn")


def adapted(folder: str = "run") -> np.ndarray:
    return np.load(Path(folder) / "adapted.npz")["x"]


@pytest.mark.slow
def test_a_run_writes_everything(flow_command, read, rows):
    ended = flow_command(*DIGITS, "max_samples=20", "epsilon_relative=0.1")
    assert ended.code == 0, ended.err
    written = {path.name for path in Path("run").iterdir()} - {".hydra"}
    assert written == TABLES | PICTURES | IMAGES
    result = read("run/result.json")
    assert result["steps"] == 2
    assert result["stopped_by"] == "steps"
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]
    assert result["value"] < result["start"]["value"]
    metrics = rows("run/metrics.csv")
    assert [int(row["step"]) for row in metrics] == [0, 1, 2]
    assert float(metrics[-1]["divergence"]) == pytest.approx(result["value"])
    assert "distance after" in ended.out
    assert str(Path("run").absolute()) in ended.out


@pytest.mark.slow
def test_the_adapted_dataset_is_a_dataset_again(flow_command, command):
    ended = flow_command("save_result=true", "report=none", "solver.require_convergence=true")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 1
    names = {path.name for path in Path("run").iterdir()}
    assert {"adapted.npz", "metrics.csv", "result.json"} <= names
    assert not [name for name in names if name.endswith((".png", ".gif"))]
    loaded = otdd.FlowResult.load("run")
    again = otdd.load("arrays", path="run/adapted.npz")
    np.testing.assert_array_equal(again.labels, loaded.samples.labels)
    np.testing.assert_array_equal(np.asarray(again.inputs), loaded.samples.features)
    ended = command(
        *("source=arrays", "source.path=run/adapted.npz", "max_samples=null", "labels=means"),
        "report=none",
    )
    assert ended.code == 0, ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("flow.mode=attached",),
        ("flow.mode=joint", "labels=means"),
        ("flow.mode=augmented", "labels.diagonal=true"),
        ("flow.optimizer=Adam", "flow.optimizer_options={betas: [0.5, 0.9]}"),
        ("flow.schedule=cosine", "flow.noise=0.1", "flow.minibatch=20"),
        ("flow.functionals=[{name: norm, weight: 0.1}, {name: entropy, weight: 0.01}]",),
        ("flow.box=[-1,1]", "flow.refresh=2", "flow.tolerance=0.5"),
        ("labels=none", "epsilon_relative=0.1"),
        ("solver.bound_width=0.05",),
        ("solver=geomloss", "solver.tolerance=1.9"),
    ],
    ids=lambda settings: settings[0].split("=", 1)[1][:20],
)
def test_settings_reach_the_flow(flow_command, read, settings):
    relative = any(each.startswith("epsilon") for each in settings)
    ended = flow_command(*settings, *(() if relative else ("epsilon=1",)), "report=none")
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    used = result["settings"]
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in used and value[0] not in "[{":
            assert str(used[key]).lower() == value.lower(), key
    ends = {"solver=geomloss": "schedule", "solver.bound_width=0.05": "bound_width"}
    stopped_by = ends.get(settings[0], "tolerance")
    assert {record["stopped_by"] for record in result["history"]} == {stopped_by}


@pytest.mark.slow
def test_pixels_stay_pixels(composed, flow_command, read):
    assert flow_command(*DIGITS, "max_samples=40", "flow.step_size=1.5").code == 0
    assert read("run/result.json")["settings"]["flow.box"] == [0, 1]
    moved = adapted()
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert flow_command("flow.steps=1").code == 0
    assert read("run/result.json")["settings"]["flow.box"] is None


@pytest.mark.slow
def test_images_move_through_a_network(flow_command, read, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("halves.py").write_text(
        "def features(images):\n    return images[..., ::2, ::2].flatten(1) * 2\n"
    )
    network = ("extractor=callable", "extractor.path=halves:features", "flow.space=pixels")
    ended = flow_command(*DIGITS[:3], *network, "max_samples=40", "extractor.batch_size=7")
    assert ended.code == 0, ended.err
    before = otdd.embed(
        otdd.load("digits", max_samples=40, seed=0), otdd.extractors.pixels()
    ).features.reshape(-1, 8, 8)
    moved = torch.from_numpy(adapted()).reshape(-1, 8, 8)
    seen = torch.zeros(8, 8, dtype=torch.bool)
    seen[::2, ::2] = True
    assert torch.equal(moved[:, ~seen], before[:, ~seen])
    assert float((moved - before)[:, seen].abs().mean()) > 1e-3


@pytest.mark.slow
def test_an_interrupted_run_writes_what_it_has_and_goes_on(flow_command, read, monkeypatch):
    steps = ("flow.steps=4", "epsilon=1", "report=none")
    assert flow_command(*steps, "hydra.run.dir=whole").code == 0
    real = adapt.gradient_flow

    def interrupted(*arguments, callbacks, **options):
        def told(record):
            callbacks.progress(record)
            if record.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

        return real(*arguments, callbacks=replace(callbacks, progress=told), **options)

    monkeypatch.setattr(adapt, "gradient_flow", interrupted)
    ended = flow_command(*steps)
    assert ended.code == 130
    assert "flow.resume=true" in ended.out
    result = read("run/result.json")
    assert result["stopped_by"] == "interrupted"
    assert result["steps"] == 2
    monkeypatch.setattr(adapt, "gradient_flow", real)
    assert flow_command(*steps, "flow.resume=true").code == 0
    np.testing.assert_array_equal(adapted("run"), adapted("whole"))
    assert read("run/result.json")["steps"] == 4


@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_same_end(flow_command, folder, monkeypatch):
    """kill -9 from within the third step, then the same command with flow.resume=true."""
    settings = ("flow.checkpoint_every=2", "flow.optimizer=adam", "flow.noise=0.05")
    settings = (*settings, "flow.steps=5", "epsilon=1", "max_samples=20")
    step = Stepper.step

    def killed(self, velocities, number, *rest):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, velocities, number, *rest)

    monkeypatch.setattr(Stepper, "step", killed)
    if (child := os.fork()) == 0:
        try:
            flow_command(*settings)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.setattr(Stepper, "step", step)
    assert (folder / "run" / "checkpoint.json").exists()
    assert not (folder / "run" / "adapted.npz").exists()
    assert flow_command(*settings, "flow.resume=true").code == 0
    assert flow_command(*settings, "hydra.run.dir=whole").code == 0
    np.testing.assert_array_equal(adapted("run"), adapted("whole"))


@pytest.mark.slow
def test_a_resumed_run_must_be_the_same_run(flow_command):
    plain = ("epsilon=1", "report=none")
    resumed = (*plain, "flow.steps=3", "flow.resume=true")
    assert "no " in flow_command("flow.resume=true").error
    assert flow_command(*plain).code == 0
    for other, said in (("flow.step_size=0.2", "flow.step_size was 0.1"), ("seed=1", "")):
        ended = flow_command(*resumed, other)
        assert ended.code == 2
        assert said in ended.error
    assert flow_command(*resumed).code == 0


@pytest.mark.slow
def test_a_picture_that_fails_is_a_notice_after_the_numbers_and_code_4(
    flow_command, read, monkeypatch
):
    there = []

    def full(*_, **__):
        there.extend(path.name for path in Path("run").iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flow_writing, "draw_objective", full)
    ended = flow_command()
    assert ended.code == 4
    assert "distance after" in ended.out
    assert {"result.json", "metrics.csv", "adapted.npz", "trajectory.npz"} <= set(there)
    assert "objective.png" in ended.err.splitlines()[0]
    assert "No space left on device" in ended.err.splitlines()[0]
    assert ended.error.startswith("the result was written, but not objective.png")
    result = read("run/result.json")
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]


@pytest.mark.slow
def test_required_convergence_ends_with_3_and_the_result(flow_command, read):
    ended = flow_command("solver.max_iterations=2", "solver.require_convergence=true")
    assert ended.code == 3
    assert "solver.require_convergence is set, and the result was written to" in ended.error
    assert "3 of 3 evaluations" in ended.error
    assert read("run/result.json")["converged"] is False
    assert len(adapted()) == 40
    ended = flow_command("solver.max_seconds=1e-9", "solver.tolerance=1e-4", "flow.steps=1")
    assert ended.code == 0
    assert "within solver.max_seconds=1e-09 in 2 of 2 evaluations" in ended.err


@pytest.mark.slow
def test_a_step_that_overshoots_leaves_the_last_good_state(flow_command):
    ended = flow_command("flow.steps=60", "flow.step_size=30", "epsilon=1")
    assert ended.code == 2
    assert "flow.step_size=30" in ended.error
    assert "step " in ended.error
    kept = otdd.Checkpoints(Path("run"))
    state = kept._state(kept._manifest(), torch.device("cpu"))
    assert bool(torch.isfinite(state["rows"]["points"]["value"]).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("flow.mode=joint", "flow.refresh=4"), "flow.refresh=4 does nothing with flow.mode=joint"),
        (("flow.keep_moments=true",), "flow.keep_moments=true needs save_result=true"),
        (("flow.refresh=2", "flow.keep_moments=true", "save_result=true"), None),
        (("labels=means", "labels.diagonal=true"), "labels.diagonal=True does nothing"),
    ],
)
def test_keys_that_do_nothing_are_said(flow_command, settings, said):
    ended = flow_command(*settings, "flow.steps=1", "report=none")
    assert ended.code == 0, ended.err
    notices = [line for line in ended.err.splitlines() if line.startswith("notice: ")]
    assert [said in line for line in notices] == [True] if said else not notices


def test_the_configuration_fits_its_settings(composed):
    flow, shared = composed(name="flow"), composed()
    parse(flow, FlowSettings)
    for key in ("lambda_x", "lambda_y", "epsilon", "epsilon_relative", "min_class_size", "solver"):
        assert flow[key] == shared[key]


@pytest.mark.slow
def test_help_explains_every_setting(composed, ended):
    shown = ended(flow_main, "--help").out
    for key in composed(name="flow").flow:
        assert key in shown, key
