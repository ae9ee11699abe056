"""Mutants are whole programs that say something else, and a test that fails kills them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.drawing import Mutant, draw
from tests.mutation.running import run

ROOT = Path(__file__).resolve().parents[1]


def test_mutants_compile_and_differ() -> None:
    for mutant in draw(ROOT, 60, seed=1):
        content = (ROOT / mutant.file).read_bytes()
        assert content[mutant.start : mutant.stop].decode() == mutant.old
        assert mutant.new.strip("()") != mutant.old
        compile(content[: mutant.start] + mutant.new.encode() + content[mutant.stop :], "m", "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("new", "status"), [("1 << 26", "survived"), ("1 << 2", "killed")])
def test_a_failing_test_kills(tmp_path: Path, new: str, status: str) -> None:
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("SIZE = 1 << 26\n")
    # A name that no test of the suite has: the fork inherits the modules of those that ran.
    (tmp_path / "test_of_a_mutant.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import small\n"
        "def test_size():\n"
        "    assert small.SIZE == 1 << 26\n"
    )
    mutant = Mutant("small/__init__.py", 1, 1, None, 7, 14, "1 << 26", new)
    verdict = run(tmp_path, mutant, [str(tmp_path / "test_of_a_mutant.py")], 60.0, {})
    assert verdict.status == status
