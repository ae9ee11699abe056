"""Random commands, calls, damaged files and kills end as the README says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.fuzzing.commands import Ended, judged
from experiments.fuzzing.verdict import summary


@pytest.mark.slow
def test_random_attempts_end_as_promised(tmp_path: Path) -> None:
    from experiments import fuzz

    torch.set_num_threads(1)
    counts = {"commands": 8, "processes": 1, "calls": 20, "files": 20, "images": 12, "kills": 1}
    attempts = list(fuzz.run(1, counts, tmp_path))
    assert len(attempts) == sum(counts.values())
    assert summary(attempts)["failures"] == []


DONE = {"value": 1.0, "bounds": [0.9, 1.1]}


@pytest.mark.parametrize(
    ("ended", "failed"),
    [
        pytest.param(Ended(0, "", "", DONE), False, id="done"),
        pytest.param(Ended(0, "", "", None), True, id="done without a result"),
        pytest.param(Ended(4, "", "", {**DONE, "value": 2.0}), True, id="outside of its bounds"),
        pytest.param(Ended(3, "", "", {**DONE, "value": float("nan")}), True, id="no number"),
        pytest.param(Ended(2, "", "error: no such file\n", None), False, id="refused"),
        pytest.param(Ended(2, "", "no such file\n", None), True, id="refused without a sentence"),
        pytest.param(Ended(1, "", "Traceback (most recent call last)", None), True, id="traceback"),
        pytest.param(Ended(5, "", "error: ", None), True, id="unknown code"),
    ],
)
def test_what_fails(ended: Ended, failed: bool) -> None:
    attempt = judged("command", "distance", ["epsilon=1"], ended)
    assert (attempt.failure is not None) is failed


def test_bad_input_has_a_sentence_unless_its_stream_is_lost() -> None:
    ended = Ended(2, "", "", None)
    assert judged("process", "distance", ["epsilon=x"], ended, ">/dev/full").failure is not None
    assert judged("process", "distance", ["epsilon=x"], ended, "2>&-").failure is None
    coloured = Ended(2, "", "\x1b[2K\x1b[?25h\n\x1b[1;31merror:\x1b[0m epsilon must be", None)
    assert judged("process", "distance", ["epsilon=x"], coloured, "FORCE_COLOR=1").failure is None
    mixed = b"libgomp: ASCII\n" + "error: epsilon must be\n".encode("utf-16")
    wide = Ended(2, "", mixed.decode(errors="replace"), None)
    assert judged("process", "distance", ["epsilon=x"], wide).failure is None
    traceback = "Traceback (most recent".encode("utf-16").decode(errors="replace")
    assert judged("process", "distance", [], Ended(2, "", traceback, None)).failure is not None
