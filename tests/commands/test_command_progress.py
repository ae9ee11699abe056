"""Progress where the output is no terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from otdd_flash.commands import messages, start
from otdd_flash.commands.messages import Phases
from otdd_flash.solver.schedules import Converged

# Of which other tests are told nothing.
SAY = Phases._say


@pytest.fixture
def clock(monkeypatch):
    """The time that phases read, in seconds, as clock[0]; the job began at 100."""
    now = [100.0]
    monkeypatch.setattr(messages.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(start, "_job", start.Job(started=100.0))
    return now


@pytest.fixture
def written(monkeypatch):
    """What goes to a file in place of a terminal."""
    file = io.StringIO()
    console = Console(file=file, width=40)
    monkeypatch.setattr(Phases, "_say", SAY)
    monkeypatch.setattr(messages, "messages", console)
    return file


def test_a_stage_has_a_line_when_it_begins_and_one_a_minute_with_the_rest(clock, written):
    with Phases() as phases:
        clock[0] += 4
        with phases.phase("load", "loading digits") as report:
            for count in range(601):
                report(count, 1200)
                clock[0] += 0.25
        with phases.phase("extract", "embedding digits"):
            clock[0] += 7
    assert written.getvalue().splitlines() == [
        "progress: 4 s, loading digits",
        # 4 a second.
        "progress: 64 s, loading digits 240 of 1,200, 4 min left at this rate",
        "progress: 124 s, loading digits 480 of 1,200, 3 min left at this rate",
        "progress: 154 s, embedding digits",
    ]
    assert phases.seconds == {"load": 150.25, "extract": 7}


def test_a_flow_is_one_stage_and_class_distances_begin_another(clock, written):
    with (
        Phases() as phases,
        phases.flowing(20),
        phases.solving("solving", Converged()) as solving,
        phases.counting("class distances") as counting,
    ):
        clock[0] += 5
        counting(0, 21900)
        for count in range(1, 61):
            clock[0] += 0.5
            counting(100 * count, 21900)
        counting(21900, 21900)
        for count in range(100):
            clock[0] += 1
            solving("xy", count, 10 ** (-count / 50))
    solving_xy, rate = "flowing; solving xy", " left at this rate"
    assert written.getvalue().splitlines() == [
        "progress: 0 s, flowing",
        "progress: 5 s, flowing; solving; class distances 0 of 21,900",
        # The error falls by a factor of ten in 50 s, and is to fall to a thousandth.
        f"progress: 65 s, {solving_xy} 29: marginal error 2.6e-01 (to 1e-03), 2 min{rate}",
        f"progress: 125 s, {solving_xy} 89: marginal error 1.7e-02 (to 1e-03), 61 s{rate}",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("runner", ["command", "flow_command"])
def test_every_command_has_lines_of_progress(runner, request, monkeypatch, read):
    monkeypatch.setattr(Phases, "_say", SAY)
    monkeypatch.setattr(messages, "SECONDS_APART", 0.0)
    # One job after another: each has a clock of its own.
    for _ in range(1 + (runner == "command")):
        ended = request.getfixturevalue(runner)()
        assert ended.code == 0
        stages = re.findall(r"^progress: (\d+) s, (.*)", ended.err, re.MULTILINE)
        told = [stage for _, stage in stages]
        for stage in ("loading source: blobs", "embedding target: blobs test", "drawing"):
            assert stage in told
        assert "xy" in ended.err
        if runner == "flow_command":
            assert "step 1 of 2: objective " in ended.err
        elapsed = sum(read("run/result.json")["seconds"].values())
        drawing = told.index("drawing")
        assert int(stages[drawing - 1][0]) <= elapsed + 1
        assert abs(int(stages[drawing][0]) - elapsed) < 2


def test_a_bar_lasts_from_the_first_report_to_the_last(monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(messages, "messages", terminal)
    with Phases() as phases, phases.counting("class distances") as report:
        bars = phases._bars
        assert not bars.tasks[0].visible
        report(7, 1200)
        assert bars.tasks[0].visible
        bars.refresh()
        report(1200, 1200)
        assert not bars.tasks[0].visible
    assert "class distances" in terminal.file.getvalue()
    assert "7 of 1,200" in terminal.file.getvalue()
