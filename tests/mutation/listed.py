"""Read the listed mutants, and find each in the code of today, wherever its function has moved."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LISTS = {"mutants": FOLDER / "mutants.jsonl", "kernels": FOLDER / "kernels.jsonl"}
SOURCES = ("otdd_flash", "kernels")


class Entry(NamedTuple):
    """One line of a list.

    Attributes:
        module: file in which the expression stood when it was listed. It decides only between
            functions of one name.
        function: qualified name, without `<locals>`; of a class, what is in it but in no method;
            empty for what is in no function.
        expression: source, in any layout. It stands once in the function.
        replacement: source that takes its place.
        why: what the mutant would do to a user.
        test: a test that runs first; needed where coverage sees no test, as in kernels and in other
            processes.
        equivalent: why no test can tell it from the code, or empty.
        removed: why the function or expression is no more, or empty.
    """

    module: str
    function: str
    expression: str
    replacement: str
    why: str = ""
    test: str = ""
    equivalent: str = ""
    removed: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same when the function moves."""
        return self.function, self.expression, self.replacement


class Mutant(NamedTuple):
    """One replacement in one file.

    Attributes:
        file: relative to the checkout.
        line: of the expression.
        statement: first line of the statement that it is part of.
        body: first and last line of the function around it, if there is one.
        start: first byte of what is replaced.
        stop: the byte after it.
        old: what stands there.
        new: what stands there instead.
    """

    file: str
    line: int
    statement: int
    body: tuple[int, int] | None
    start: int
    stop: int
    old: str
    new: str

    def applied(self, content: bytes) -> bytes:
        """The file with the replacement."""
        assert content[self.start : self.stop].decode() == self.old
        return content[: self.start] + self.new.encode() + content[self.stop :]


class NotFoundError(LookupError):
    """The expression stands nowhere, or in several places."""


def read(path: Path) -> list[Entry]:
    """The entries of a list."""
    return [Entry(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def find(entry: Entry, root: Path) -> Mutant:
    """Where an entry stands in a checkout.

    Raises:
        NotFoundError: not in its module, and not once in all others.
    """
    wanted = parsed(entry.expression)
    for files in ([root / entry.module], sources(root)):
        places = [place for path in files for place in _places(entry, wanted, path, root)]
        if len(places) == 1:
            return places[0]
    number = f"{len(places)} times" if places else "nowhere"
    raise NotFoundError(f"{entry.function}: {entry.expression!r} stands {number}")


def sources(root: Path) -> list[Path]:
    """The files of the package; the link to the kernels is not followed."""
    return sorted(path for name in SOURCES for path in (root / name).rglob("*.py"))


def parsed(source: str) -> ast.AST:
    """The expression, or the statement, of a source in any layout.

    Raises:
        SyntaxError: it is neither.
    """
    (statement,) = ast.parse(source).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def scopes(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Nodes by the qualified name of the innermost function or class around them."""
    found: defaultdict[str, list[ast.AST]] = defaultdict(list)

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            found[name].append(child)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            visit(child, f"{name}.{child.name}".lstrip(".") if named else name)

    visit(tree, "")
    return found


def mutant_at(path: Path, root: Path, node: ast.AST, new: str) -> Mutant:
    """The replacement of a node of a file."""
    content, starts, parents, _ = _file(path)
    start = starts[node.lineno - 1] + node.col_offset
    stop = starts[node.end_lineno - 1] + node.end_col_offset
    around = [node]
    while around[-1] in parents:
        around.append(parents[around[-1]])
    statement = next(part for part in around if isinstance(part, ast.stmt))
    functions = (part for part in around if isinstance(part, ast.FunctionDef))
    bodies = ((part.body[0].lineno, part.end_lineno) for part in functions)
    return Mutant(
        path.relative_to(root).as_posix(),
        node.lineno,
        statement.lineno,
        next(bodies, None),
        start,
        stop,
        content[start:stop].decode(),
        new,
    )


def _places(entry: Entry, wanted: ast.AST, path: Path, root: Path) -> Iterator[Mutant]:
    """Where the expression stands in functions of that name in a file."""
    last = entry.function.rpartition(".")[2]
    if not path.is_file() or last not in path.read_text("utf-8"):
        return
    dumped, spans = ast.dump(wanted), set()
    for node in _file(path)[3].get(entry.function, ()):
        # A call that is a statement is there twice, as which it is once.
        if type(node) is type(wanted) and ast.dump(node) == dumped:
            mutant = mutant_at(path, root, node, entry.replacement)
            if (mutant.start, mutant.stop) not in spans:
                spans.add((mutant.start, mutant.stop))
                yield mutant


@cache
def _file(
    path: Path,
) -> tuple[bytes, list[int], dict[ast.AST, ast.AST], dict[str, list[ast.AST]]]:
    """Content of a file, first bytes of its lines, parents of its nodes, and nodes by scope."""
    content = path.read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(content)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return content, starts, parents, scopes(tree)
