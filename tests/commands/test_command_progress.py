"""Progress where the output is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from otdd_flash.commands import messages, progress
from otdd_flash.commands.progress import Phases
from otdd_flash.solver.schedules.converged import Converged


@pytest.fixture
def clock(monkeypatch):
    """The time that phases read, in seconds, as clock[0]."""
    now = [100.0]
    monkeypatch.setattr(progress, "SECONDS_APART", 1.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def written(monkeypatch):
    """What goes to a file in place of a terminal."""
    file = io.StringIO()
    console = Console(file=file, width=40)
    monkeypatch.setattr(progress, "messages", console)
    monkeypatch.setattr(messages, "messages", console)
    return file


def test_there_is_a_line_a_second_at_the_most(clock, written):
    with Phases() as phases, phases.phase("load", "loading digits") as report:
        for count in range(50):
            clock[0] += 0.125
            report(count, 1200)
    lines = written.getvalue().splitlines()
    assert lines == [
        f"progress: {second} s, loading digits {8 * second - 1} of 1,200" for second in range(1, 7)
    ]


def test_a_line_says_what_all_parts_are_doing(clock, written):
    with (
        Phases() as phases,
        phases.flowing(20),
        phases.solving("solving", Converged()) as solving,
        phases.counting("class distances") as counting,
    ):
        counting(1200, 21900)
        clock[0] += 5
        solving("xy", 24, 2e-2)
    assert written.getvalue() == (
        "progress: 5 s, flowing; solving xy 24: marginal error 2.0e-02 (to 1e-03); "
        "class distances 1,200 of 21,900\n"
    )


def test_what_is_done_in_a_second_says_nothing(clock, written):
    with Phases() as phases, phases.phase("load", "loading digits") as report:
        clock[0] += 0.9
        report(1, 2)
    assert written.getvalue() == ""


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["command", "flow_command"])
def test_every_command_has_lines_of_progress(runner, request, monkeypatch, undrawn):
    monkeypatch.setattr(progress, "SECONDS_APART", 0.0)
    ended = request.getfixturevalue(runner)()
    assert ended.code == 0
    assert "progress: 0 s, " in ended.err
    assert "xy" in ended.err
    if runner == "flow_command":
        assert "step 1 of 2: objective " in ended.err
