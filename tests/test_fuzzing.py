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
    counts = {"commands": 6, "processes": 1, "calls": 20, "files": 12, "images": 8, "kills": 1}
    attempts = list(fuzz.run(1, counts, tmp_path))
    assert len(attempts) == sum(counts.values())
    assert summary(attempts)["failures"] == []


def test_what_fails() -> None:
    done, sentence = {"value": 1.0, "bounds": [0.9, 1.1]}, "error: no such file\n"
    for ended, failed in (
        (Ended(0, "", "", done), False),
        (Ended(0, "", "", None), True),
        (Ended(4, "", "", {**done, "value": 2.0}), True),
        (Ended(3, "", "", {**done, "value": float("nan")}), True),
        (Ended(2, "", sentence, None), False),
        (Ended(2, "", f"\x1b[2K\x1b[1;31m{sentence}", None), False),
        (Ended(2, "", "no such file\n", None), True),
        (Ended(1, "", "Traceback (most recent call last)", None), True),
        (Ended(5, "", "error: ", None), True),
    ):
        attempt = judged("command", "distance", ["epsilon=1"], ended)
        assert (attempt.failure is not None) is failed, ended
