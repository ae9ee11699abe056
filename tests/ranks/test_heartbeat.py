"""Ranks that are stopped are missed; those that are busy, leave or sleep are not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_torchrun as torchrun
import torch
from forked_torchrun import Started
from torch.distributed import HashStore

from otdd_flash.commands import ranks as heartbeat
from otdd_flash.commands.ranks import Heartbeat

INTERVAL, LIMIT = 0.02, 0.5


class Watched(Heartbeat):
    """Remembers whom it would have ended for."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size, INTERVAL, LIMIT)
        self.lost: list[tuple[str, int | None]] = []

    def _end(self, who: str, process: int | None = None, *, speaks: bool = True) -> None:
        self.lost.append((who, process))
        self._ended.set()


@contextmanager
def beating(*watched: Watched) -> Iterator[None]:
    for each in watched:
        each.start()
    try:
        yield
    finally:
        for each in watched:
            each.stop()


def waited(condition: Any) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(INTERVAL)
    return bool(condition())


def heard(watched: Watched, *ranks: int) -> bool:
    return waited(lambda: all(watched._heard.get(rank) for rank in ranks))


def test_ranks_that_beat_or_have_left_are_not_missed() -> None:
    store = HashStore()
    first, second, third = (Watched(store, rank, 3) for rank in range(3))
    with beating(first, third):
        with beating(second):
            assert heard(first, 1, 2)
            assert heard(second, 0)
        time.sleep(2 * LIMIT)
    assert first.lost == second.lost == third.lost == []


@pytest.mark.parametrize(
    ("rank", "beat", "missed"),
    [
        # One on this machine, as torchrun has it.
        (0, f"7 {2**22 + 5} 3", ("rank 1", 2**22 + 5)),
        # One of another machine is no process here.
        (0, f"7 {os.getpid()} 1", ("rank 1", None)),
        (1, f"7 {2**22 + 5} 3", ("rank 0", 2**22 + 5)),
        # Stopped before its first beat.
        (0, None, ("rank 1", None)),
    ],
    ids=["of this machine", "of another machine", "the first rank", "before its first beat"],
)
def test_a_rank_that_stops_beating_is_missed_by_name(
    rank: int,
    beat: str | None,
    missed: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    store = HashStore()
    watching, third = Watched(store, rank, 3), Watched(store, 2, 3)
    if beat is not None:
        store.set(f"beat/{1 - rank}", beat)
    with beating(watching, third):
        assert waited(lambda: watching.lost)
        if rank == 0:
            # Of a follower only rank 0 is told.
            assert third.lost == []
    assert watching.lost == [missed]


class Broken:
    """A store whose process has ended."""

    calls = 0

    def set(self, *_: object) -> None:
        self.calls += 1
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    def add(self, *_: object) -> None:
        self.set()


class Silent(Broken):
    """A store that does not answer, as where its machine is gone."""

    def set(self, *_: object) -> None:
        self.calls += 1
        threading.Event().wait()


@pytest.mark.parametrize("kind", [Broken, Silent])
def test_a_store_that_is_gone_is_missed_and_keeps_nobody(
    kind: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "ANSWER", LIMIT)
    store = kind()
    alone = Watched(store, 0, 2)
    alone.start()
    assert waited(lambda: alone.lost)
    assert alone.lost == [("the store of torchrun", None)]
    # Every call of a broken store prints a page of frames of C++.
    assert store.calls == 1
    # One that is done does not wait for it.
    done = Watched(kind(), 0, 2)
    done.start()
    ending = threading.Thread(target=done.stop, daemon=True)
    ending.start()
    ending.join(10 * LIMIT)
    assert not ending.is_alive()


def test_a_torchrun_that_is_stopped_by_hand_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "ANSWER", LIMIT)
    monkeypatch.setattr(heartbeat, "_state", lambda process: "T" if process == os.getppid() else "")
    alone = Watched(Silent(), 0, 2)
    with beating(alone):
        time.sleep(2 * LIMIT)
    assert alone.lost == []


def test_a_watcher_that_slept_misses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all processes of a computer do that sleeps: beats are counted, not seconds."""
    store = HashStore()
    first = Watched(store, 0, 2)
    store.set("beat/1", "1 2 3")
    first._listen()
    time.sleep(2 * LIMIT)
    first._listen()
    assert first.lost == []


def test_a_process_that_has_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    first = Watched(HashStore(), 0, 3)
    first._heard[1] = f"5 {os.getpid()} 0"
    assert first.gone() is None
    # Nobody has waited for it yet, as torchrun may not have.
    ended = subprocess.Popen(["true"])
    first._heard[2] = f"5 {ended.pid} 0"
    assert first.gone() == 2
    ended.wait()
    assert first.gone() == 2


def test_rank_0_ends_the_others_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise RuntimeError("gone")

    monkeypatch.setattr(heartbeat.os, "_exit", leave)
    store = HashStore()
    first, second, third = (Watched(store, rank, 3) for rank in range(3))
    with beating(first, second, third):
        first.end_others(130)
        assert waited(lambda: len(left) == 2)
    assert left == [130, 130]


def test_a_rank_ends_once_all_others_are_about_to_or_time_is_up() -> None:
    store = HashStore()
    second = Watched(store, 1, 3)
    for waits in (True, False):
        store.add(heartbeat.ENDING, 1)
        started = time.monotonic()
        second._met(LIMIT)
        assert (time.monotonic() - started >= LIMIT) == waits


@pytest.mark.parametrize(("code", "expected"), [(130, [130]), (2, [2]), (1, [])])
def test_torchrun_ends_the_others_after_a_defect(
    code: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may start them again then; they are not told to end with a code of their own."""
    ended: list[int] = []
    dismissed: list[int] = []
    monkeypatch.setattr(heartbeat, "_heartbeat", SimpleNamespace(end_others=ended.append))
    monkeypatch.setattr(heartbeat, "_end_as_meant", lambda: None)
    monkeypatch.setattr(heartbeat, "_leave", lambda: None)
    heartbeat._dismiss(SimpleNamespace(apart=True, dismiss=dismissed.append), code)
    assert (ended, dismissed) == (expected, [code])


SHORT = """
from otdd_flash.commands import ranks as heartbeat
heartbeat.INTERVAL, heartbeat.LIMIT = 0.2, 3.0
from otdd_flash.flow import main, run_command
run_command(main)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("torchrun")
@pytest.mark.parametrize(("number", "kind"), [(0, "STOP"), (1, "KILL")])
def test_a_lost_rank_is_named_and_all_end(number: int, kind: str, tmp_path: Path) -> None:
    script, run = tmp_path / "short.py", tmp_path / "run"
    script.write_text(SHORT)
    steps = ("flow.steps=100000", "flow.checkpoint_every=1", f"hydra.run.dir={run}")
    process = Started(tmp_path, str(script), *torchrun.SMALL, *steps)
    lost = process.rank(number)
    torchrun.wait_for_steps(process, run)
    os.kill(lost, getattr(signal, f"SIG{kind}"))
    said = process.ended()
    assert process.returncode == 1
    assert -signal.SIGKILL in torchrun.exit_codes(said)
    if kind == "STOP":
        assert said.count(f"rank {number} has not answered for 3 s") == 1, said
        assert said.count("error: ") == 1, said
    else:
        # torchrun may end the other before that has said it, and names the rank in its report.
        assert re.search(rf"rank +: {number} .*\n.*exitcode +: -9 ", said), said
        assert said.count("error: ") == said.count(f"rank {number} has ended") <= 1, said
    assert not (run / "result.json").exists()
