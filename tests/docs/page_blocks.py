"""Blocks of code in README.md and in the pages of docs/, and what runs those in Python.

A block that cannot run everywhere says so in its first line, where a reader sees it. A block of
text after another block is what that one prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = (
    "Needs a GPU.",
    "Needs several GPUs.",
    "Needs your own data.",
    "Needs the network.",
    "Takes minutes.",
)
_LAUNCHER = r"(?:\$ )?(?:(?:\S*/)?python3?|torchrun(?: \S+)*?)"
COMMAND = re.compile(_LAUNCHER + r" -m (?P<module>otdd_flash\S*)(?P<arguments>.*)")
# Whose examples continue one another.
CONTINUED = "docs/api.md"
# In the first line of an example that torchrun starts.
TORCHRUN = "# torchrun --nproc-per-node 2"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, in which language, its mark, and what it should print."""

    page: str
    line: int
    language: str
    code: str
    mark: str | None
    output: str | None

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of this package, continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        lines = [re.sub(r"\s+", " ", line).strip() for line in lines]
        return [line for line in lines if COMMAND.match(line)]


def blocks_of(text: str, page: str) -> list[Block]:
    """All blocks of a page but those of text that belong to another."""
    found = list(_FENCE.finditer(text))
    blocks = []
    for index, block in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else None
        if block[1] == "text":
            continue
        output = None
        if following is not None and following[1] == "text":
            between = text[block.end() : following.start()].strip()
            output = None if between else following[2]
        first = block[2].split("\n", 1)[0].removeprefix("# ").strip()
        mark = first if first in MARKS else None
        line = text.count("\n", 0, block.start()) + 1
        blocks.append(Block(page, line, block[1], block[2], mark, output))
    return blocks


def all_blocks() -> list[Block]:
    """The blocks of README.md and of docs/, in the pages' order."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    ]


def arguments_of(command: str) -> tuple[str, list[str]]:
    """The module and the arguments of a command."""
    match = COMMAND.match(command)
    assert match is not None, command
    return match["module"], shlex.split(match["arguments"], comments=True)


def differences(shown: str, printed: str) -> Iterator[str]:
    """Lines of `shown` that are not printed in this order, numbers but for 1%."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() and not any(_begins(candidate, line) for candidate in lines):
            yield line


def _begins(printed: str, shown: str) -> bool:
    """Whether a printed line begins with the words and numbers of a shown one."""
    words, numbers = _NUMBER.split(shown.rstrip()), _NUMBER.findall(shown)
    pieces = _NUMBER.findall(printed)[: len(numbers)]
    if len(pieces) < len(numbers):
        return False
    near = all(
        abs(float(one) - float(other)) <= 1e-3 + 0.01 * abs(float(other))
        for one, other in zip(pieces, numbers, strict=True)
    )
    text = _NUMBER.split(printed)
    return (
        near and text[: len(words) - 1] == words[:-1] and text[len(words) - 1].startswith(words[-1])
    )


def run_python(page: str, only: str | None = None) -> list[str]:
    """Run the page's blocks in Python, and return what went wrong.

    Each has a namespace of its own, but for those of the API page, which continue one another.

    `only` is the line of the one to run; else those that torchrun starts are left out.
    """
    warnings.simplefilter("error", UserWarning)
    failures = []
    common: dict[str, object] = {"__name__": "__main__"}
    for block in all_blocks():
        if block.page != page or block.language != "python" or block.mark is not None:
            continue
        if only != str(block.line) if only else block.code.startswith(TORCHRUN):
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                names = common if page == CONTINUED else {"__name__": "__main__"}
                exec(compile(block.code, block.name, "exec"), names)
        except Exception:
            failures.append(f"{block.name}\n{traceback.format_exc()}")
            continue
        missing = list(differences(block.output or "", printed.getvalue()))
        if missing:
            failures.append(f"{block.name} does not print {missing}, but\n{printed.getvalue()}")
    return failures


if __name__ == "__main__":
    sys.exit("\n".join(run_python(*sys.argv[1:])) or 0)
