"""Mutants of the package: one expression replaced by another that means something else."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("engine", "solver", "labels", "operators")

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}
OPPOSITES = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("clamp_min", "clamp_max"),
    ("argmin", "argmax"),
)
RENAMED = {name: other for pair in OPPOSITES for name, other in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """One replacement in one file.

    Attributes:
        file: relative to the checkout.
        line: of the expression, and of the statement it is part of.
        statement: likewise.
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


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """So many mutants, at random among all that there are."""
    found = [
        mutant
        for folder in FOLDERS
        for path in sorted((root / "otdd_flash" / folder).rglob("*.py"))
        for mutant in mutants_of(path, root)
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    text = path.read_text(encoding="utf-8")
    content, lines = text.encode(), text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    left_out = _left_out(tree, lines)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        for part, new in _replacements(node, parents.get(node)):
            start = starts[part.lineno - 1] + part.col_offset
            stop = starts[part.end_lineno - 1] + part.end_col_offset
            yield Mutant(
                str(path.relative_to(root)),
                part.lineno,
                _statement(part, parents).lineno,
                _body(part, parents),
                start,
                stop,
                content[start:stop].decode(),
                new,
            )


def _left_out(tree: ast.Module, lines: list[str]) -> set[ast.AST]:
    """Types, messages, flags of dataclasses, and what only a GPU executes."""
    tops: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            first = node.lineno - 1
            if "jit" in decorators or "# pragma: gpu" in lines[first]:
                tops.append(node)
            tops += node.decorator_list
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            tops.append(node.returns)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            tops.append(node.annotation)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            tops.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            tops.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("TypeVar", "cast"):
            tops.append(node)
    return {part for top in tops for part in ast.walk(top)}


def _replacements(node: ast.AST, parent: ast.AST | None) -> Iterator[tuple[ast.AST, str]]:
    """What may stand where a node or a part of it stands."""
    match node:
        case ast.Compare() if type(node.ops[0]) in SWAPPED:
            yield node, _changed(node, ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]])
        case ast.BinOp() if type(node.op) in SWAPPED:
            yield node, _changed(node, op=SWAPPED[type(node.op)]())
        case ast.AugAssign() if type(node.op) in SWAPPED:
            yield node, ast.unparse(_copied(node, op=SWAPPED[type(node.op)]()))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, _changed(node, op=other)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, f"({node.value + 1})"
        case ast.Constant(value=float()):
            yield node, f"({node.value * 2 or 1.0!r})"
        case ast.Attribute() if node.attr in RENAMED and isinstance(parent, ast.Call):
            yield node, _changed(node, attr=RENAMED[node.attr])
        case ast.Name() if node.id in RENAMED and isinstance(parent, ast.Call):
            yield node, RENAMED[node.id]
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.IfExp():
            yield node, _changed(node, body=node.orelse, orelse=node.body)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.If():
            yield node.test, "True"
            yield node.test, "False"


def _copied(node: ast.AST, **parts: object) -> ast.AST:
    changed = copy.copy(node)
    for name, part in parts.items():
        setattr(changed, name, part)
    return changed


def _changed(node: ast.AST, **parts: object) -> str:
    return f"({ast.unparse(_copied(node, **parts))})"


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node


def _body(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[int, int] | None:
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            return node.body[0].lineno, node.end_lineno
    return None
