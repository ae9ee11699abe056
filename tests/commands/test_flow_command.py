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
from otdd_flash.commands.messages import interrupts_noted
from otdd_flash.flow import main as flow_main
from otdd_flash.report import flow as flow_writing

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
    more = ("epsilon_relative=0.1", "flow.step_size=1.5", "save_result=true")
    ended = flow_command(*DIGITS, "max_samples=20", *more)
    assert ended.code == 0, ended.err
    written = {path.name for path in Path("run").iterdir()} - {".hydra"}
    assert written == TABLES | PICTURES | IMAGES | {"result.safetensors"}
    result = read("run/result.json")
    assert result["steps"] == 2
    assert result["stopped_by"] == "steps"
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]
    assert result["value"] < result["start"]["value"]
    metrics = rows("run/metrics.csv")
    assert [int(row["step"]) for row in metrics] == [0, 1, 2]
    assert float(metrics[-1]["divergence"]) == pytest.approx(result["value"])
    # Pixels stay pixels.
    assert result["settings"]["flow.box"] == [0, 1]
    assert 0 <= adapted().min() < adapted().max() <= 1
    # And the dataset is one again.
    loaded, again = otdd.FlowResult.load("run"), otdd.load("arrays", path="run/adapted.npz")
    np.testing.assert_array_equal(again.labels, loaded.samples.labels)
    np.testing.assert_array_equal(again.inputs.reshape(20, -1), loaded.samples.features)
    assert "distance after" in ended.out
    assert str(Path("run").absolute()) in ended.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (
            "flow.mode=augmented",
            "flow.optimizer=Adam",
            "flow.optimizer_options={betas: [0.5, 0.9]}",
        ),
        ("flow.schedule=cosine", "flow.mode=attached", "flow.minibatch=20"),
        ("flow.functionals=[{name: norm, weight: 0.1}, {name: entropy, weight: 0.01}]",),
        ("flow.box=[-1,1]", "flow.refresh=2", "flow.tolerance=0.5"),
        ("solver=geomloss", "solver.tolerance=1.9"),
    ],
    ids=lambda settings: settings[0].split("=", 1)[1][:20],
)
def test_settings_reach_the_flow(flow_command, read, settings):
    ended = flow_command(*settings, "epsilon=1", "report=none")
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    used = result["settings"]
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in used and value[0] not in "[{":
            assert str(used[key]).lower() == value.lower(), key
    stopped_by = "schedule" if "solver=geomloss" in settings else "tolerance"
    assert {record["stopped_by"] for record in result["history"]} == {stopped_by}


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
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(flow_writing, "draw_objective", full)
    ended = flow_command()
    assert ended.code == 4
    assert "distance after" in ended.out
    assert {"metrics.csv", "adapted.npz", "trajectory.npz"} <= {*os.listdir("run")}
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


@pytest.mark.slow
def test_keys_that_do_nothing_are_said(flow_command):
    for settings, said in (
        (("flow.mode=joint", "flow.refresh=4"), "flow.refresh=4 does nothing with flow.mode=joint"),
        (("flow.keep_moments=true",), "flow.keep_moments=true needs save_result=true"),
        (("flow.refresh=2", "flow.keep_moments=true", "save_result=true"), None),
    ):
        ended = flow_command(*settings, "flow.steps=1", "report=none")
        assert ended.code == 0, ended.err
        notices = [line for line in ended.err.splitlines() if line.startswith("notice: ")]
        assert [said in line for line in notices] == [True] if said else not notices


@pytest.mark.slow
def test_help_explains_every_setting(composed, ended):
    shown = ended(flow_main, "--help").out
    for key in composed(name="flow").flow:
        assert key in shown, key


def test_ctrl_c_twice_ends_at_once_and_afterwards_once_again(capsys):
    before = signal.getsignal(signal.SIGINT)
    with interrupts_noted() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C again ends at once" in capsys.readouterr().err
