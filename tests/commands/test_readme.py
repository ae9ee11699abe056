"""Every command and every Python example that the README shows runs as shown."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from otdd_flash.commands.outcome import Outcome

README = Path(__file__).resolve().parents[2] / "README.md"
DATA_FOLDER = "~/data"
COMMAND = re.compile(r"(?:\$ )?(?:\S*/)?python3? -m (?P<module>otdd_flash\S*)(?P<arguments>.*)")


def fenced(text: str, *languages: str) -> list[str]:
    """The blocks of code in these languages."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)
    return [code for language, code in blocks if language in languages]


def commands(text: str) -> list[str]:
    """The commands of this package in shell blocks, continued lines joined."""
    joined = "\n".join(fenced(text, "bash", "console", "sh", "shell")).replace("\\\n", " ")
    lines = [re.sub(r"\s+", " ", line).strip() for line in joined.splitlines()]
    return [line for line in lines if COMMAND.match(line)]


COMMANDS = commands(README.read_text(encoding="utf-8"))
EXAMPLES = fenced(README.read_text(encoding="utf-8"), "python")


def test_the_parser_finds_commands_and_examples():
    text = (
        "```bash\nmake demo\n.venv/bin/python -m otdd_flash.distance \\\n  a=1\n```\n"
        "```console\n$ python -m otdd_flash.distance b=2   # why\n0.5\n```\n```python\nx = 1\n```\n"
        "Text: python -m otdd_flash.distance c=3\n```\npython -m otdd_flash.distance d=4\n```\n"
    )
    assert commands(text) == [
        ".venv/bin/python -m otdd_flash.distance a=1",
        "$ python -m otdd_flash.distance b=2 # why",
    ]
    assert fenced(text, "python") == ["x = 1\n"]


def test_the_readme_shows_commands_and_examples():
    assert len(COMMANDS) >= 3
    assert EXAMPLES


@pytest.fixture
def with_data(request: pytest.FixtureRequest):
    """Replaces the README's data folder; skips what needs it where the data are not there."""

    def replaced(text: str) -> str:
        if DATA_FOLDER not in text:
            return text
        return text.replace(DATA_FOLDER, str(request.getfixturevalue("real_data")))

    return replaced


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_readme(line, with_data, tmp_path, monkeypatch, capsys):
    match = COMMAND.match(with_data(line))
    assert match is not None
    arguments = shlex.split(match["arguments"], comments=True)
    if "--help" not in arguments:
        # Not the user's own.
        arguments.append(f"cache_dir={tmp_path}/cache")
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    monkeypatch.setattr(Outcome, "exit_code", 0)
    monkeypatch.delitem(sys.modules, match["module"], raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(match["module"], run_name="__main__", alter_sys=True)
    assert not ended.value.code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_of_the_readme(code, with_data):
    # In a process of its own: an example may leave anything behind.
    program = ["import warnings", "warnings.simplefilter('error', UserWarning)", with_data(code)]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
