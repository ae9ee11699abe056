"""Exact distances in several processes: the same numbers, refused where they would not end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.labels import exact
from otdd_flash.labels.exact import exact_distances
from otdd_flash.labels.pairs import all_pairs, split_classes


@pytest.fixture
def clouds(blobs):
    return split_classes(blobs((40, 25, 31, 8, 1), 6, dtype="float32"))


@pytest.mark.slow
def test_several_processes_compute_what_one_does_also_after_an_interruption(clouds, monkeypatch):
    pairs = all_pairs(len(clouds))
    alone = exact_distances(clouds, pairs)
    # Even tiny work is shared out, a pair at a time.
    monkeypatch.setattr(exact, "_workers", lambda *_: 2)
    monkeypatch.setattr(exact, "SECONDS_PER_TASK", 1e-9)
    heard: list[tuple[int, int]] = []

    def interrupt(*event):
        heard.append(event)
        if len(heard) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exact_distances(clouds, pairs, progress=interrupt)
    shared = exact_distances(clouds, pairs, progress=interrupt)
    assert heard[1:] == [(done, 10) for done in range(1, 11)]
    for one, two in zip(shared, alone, strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_a_script_needs_no_guard_and_processes_end_with_it(tmp_path):
    """A user's script without `if __name__ == "__main__"`, which then dies of a signal."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, torch
        from otdd_flash.labels import exact
        from otdd_flash.labels.pairs import ClassCloud
        from otdd_flash.labels.pairs import all_pairs
        exact._workers, exact.SECONDS_PER_TASK = (lambda *_: 2), 1e-9
        rows = torch.arange(24.0).reshape(8, 3).split(2)
        clouds = [ClassCloud(str(k), points, None) for k, points in enumerate(rows)]
        print(exact.exact_distances(clouds, all_pairs(4)).values.tolist(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Waits for the output's end, which processes left behind would hold open.
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.stdout == "[108.0, 432.0, 108.0, 972.0, 432.0, 108.0]\n"


def test_processes_have_memory_for_their_pairs(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 64)
    monkeypatch.setattr(exact, "free_memory", lambda _: 10 * 2**30)
    assert exact._workers(1e5, exact.MAX_PAIRS_OF_POINTS) == 8
    assert exact._workers(1e5, 1000) == 64
    monkeypatch.setattr(exact, "free_memory", lambda _: 0)
    assert exact._workers(1e5, 1000) == 1
    # Tiny work starts none.
    assert exact._workers(exact.SECONDS_WORTH_PROCESSES / 2, 10) == 1


def test_only_the_pairs_that_are_asked_for_have_to_fit(clouds, monkeypatch):
    monkeypatch.setattr(exact, "MAX_PAIRS_OF_POINTS", 500)
    assert len(exact_distances(clouds, torch.tensor([[3, 0], [4, 1]])).values) == 2
    with pytest.raises(InputError, match=r"'1' of blobs \(25 samples\) and '0' of blobs \(40 "):
        exact_distances(clouds, torch.tensor([[3, 0], [1, 0]]))


def test_an_unfinished_plan_is_not_returned(clouds, monkeypatch):
    monkeypatch.setattr(exact, "MAX_PIVOTS", 2)
    with pytest.raises(InputError, match=r"'1' of blobs and class '0' of blobs did not end well"):
        exact_distances(clouds, torch.tensor([[1, 0]]))
