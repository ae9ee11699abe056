"""Draw mutants for the list, `python -m tests.mutation.drawing --count 10`: lines to add to it.

An expression is widened until it stands once in its function, and is found again after moves.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from tests.mutation.listed import LISTS, Entry, find, parsed, read, scopes, sources

ROOT = Path(__file__).resolve().parents[2]

# What certificates rest on: half of all mutants, a quarter of them from each.
CORE = {
    "ranks": r"/distributed/|/ring|/(sharing|self_share|parts|by_ranks)\.py"
    r"|commands/ranks\.py",
    "certificate": r"solver/(matrix/(result|gradients)\.|"
    r"(solve|term|certificate|shortfall|divergence)\.)|derivatives/(groups|group_flows|plan_links)\.",
    "evidence": r"/(engine|formulas)/|solver/evidence\.py",
    "exact": r"/solver/exact/",
    "passes": r"/(cost|operators)/|otdd_flash/memory\.py|^kernels/",
}
LONGEST = 120
# Graphs, streams and events of a GPU.
ON_A_GPU = ("recording.py", "departure.py", "launch.py")

PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr)),
)
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **dict(PAIRS),
    **{other: one for one, other in PAIRS},
    **dict.fromkeys((ast.Pow, ast.FloorDiv, ast.Mod), ast.Mult),
    ast.LShift: ast.RShift,
}
OPPOSITES = (
    *(("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax")),
    *(("any", "all"), ("floor", "ceil"), ("clamp_min", "clamp_max")),
)
RENAMED = {**dict(OPPOSITES), **{other: name for name, other in OPPOSITES}}
# Calls of types and messages.
WORDS = ("TypeVar", "cast", "Error", "Warning", "warn")
# Keywords that change no value.
OF_NO_VALUE = ("strict", "keepdim", "keepdims", "non_blocking", "pin_memory")

# What an expression is widened to; what holds a block of statements is not replaced.
PARTS = ast.expr, ast.keyword, ast.comprehension
WIDER = *PARTS, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Assert


def main() -> None:
    """Print new entries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    listed = read(LISTS["mutants"]) if LISTS["mutants"].exists() else []
    for entry in draw(ROOT, given.count, given.seed, listed):
        row = {name: value for name, value in entry._asdict().items() if value}
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


def draw(root: Path, count: int, seed: int, listed: list[Entry]) -> list[Entry]:
    """So many entries, half of them in `CORE`; of files in turn, one a function where that goes."""
    random_state, drawn = random.Random(seed), [*listed]
    groups: dict[str, list[Path]] = {name: [] for name in (*CORE, "rest")}
    for path in sources(root):
        if path.name not in ON_A_GPU:
            groups[group(path.relative_to(root).as_posix())].append(path)
    for number, (name, paths) in enumerate(groups.items()):
        wanted = count - count // 2 if name == "rest" else (count // 2 + number) // len(CORE)
        queues = {path: _candidates(path, root, random_state) for path in paths}
        before, taken = len(drawn), {(each.module, each.function) for each in drawn}
        while queues and len(drawn) - before < wanted:
            for path in random_state.sample(list(queues), len(queues)):
                if len(drawn) - before == wanted:
                    break
                fresh = (each for each in queues[path] if (each.module, each.function) not in taken)
                entry = next(fresh, None)
                if entry is None:
                    del queues[path]
                else:
                    taken.add((entry.module, entry.function))
                    drawn.append(entry)
    return drawn[len(listed) :]


def group(file: str) -> str:
    return next((name for name, pattern in CORE.items() if re.search(pattern, file)), "rest")


def _candidates(path: Path, root: Path, random_state: random.Random) -> Iterator[Entry]:
    """The mutants of a file that mean something else and can be found again, in a random order."""
    found = list(entries_of(path, root))
    content = path.read_bytes()
    plain = compiled(content)
    for entry in random_state.sample(found, len(found)):
        try:
            changed = compiled(find(entry, root).applied(content))
        except (SyntaxError, LookupError):
            continue
        if changed != plain:
            yield entry


def compiled(content: bytes) -> object:
    """What a file is compiled to, without the lines that it stands in."""

    def plain(code: CodeType) -> object:
        constants = [plain(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, constants

    return plain(compile(content, "mutant", "exec", dont_inherit=True))


def entries_of(path: Path, root: Path) -> Iterator[Entry]:
    """All mutants of a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    left_out = _left_out(tree, text.splitlines())
    for function, nodes in scopes(tree).items():
        counts = Counter(map(ast.dump, nodes))
        for node in nodes:
            if node in left_out or not _in_a_function(node, parents):
                continue
            for part, new in _replacements(node, parents.get(node)):
                found = _widened(part, new, parents, counts)
                if found is not None:
                    yield Entry(path.relative_to(root).as_posix(), function, *found)


def _widened(
    node: ast.AST, new: str, parents: dict[ast.AST, ast.AST], counts: Counter[str]
) -> tuple[str, str] | None:
    """What the node is in that stands once and is no bare name or number, as it is and changed."""
    changed, widest = parsed(new), None
    while True:
        old, plain = ast.unparse(node), node.value if isinstance(node, ast.Expr) else node
        if len(old) > LONGEST:
            return widest
        if counts[ast.dump(plain)] == 1 and _stands_alone(old, plain):
            statement = isinstance(node, ast.stmt)
            widest = old, ast.unparse(changed) if statement else f"({ast.unparse(changed)})"
            if not isinstance(node, ast.Constant | ast.Name):
                return widest
        parent = parents.get(node)
        if not isinstance(parent, WIDER):
            return widest
        changed = copy.deepcopy(parent, {id(node): changed})
        node = parent


def _in_a_function(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a function is the next around it: constants of modules and classes are choices."""
    while node in parents and not isinstance(node, ast.FunctionDef | ast.ClassDef):
        node = parents[node]
    return isinstance(node, ast.FunctionDef)


def _stands_alone(source: str, node: ast.AST) -> bool:
    """Whether a source is that of the node by itself, as those of a slice are not."""
    try:
        return ast.dump(parsed(source)) == ast.dump(node)
    except (SyntaxError, ValueError):
        return False


def _left_out(tree: ast.Module, lines: list[str]) -> set[ast.AST]:
    """Types, messages, flags of dataclasses, and what only a GPU executes."""
    tops: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            only_gpu = "jit" in decorators or "# pragma: gpu" in lines[node.lineno - 1]
            if only_gpu or node.name in ("__repr__", "__str__"):
                tops.append(node)
            tops += node.decorator_list
        if isinstance(node, ast.If | ast.IfExp) and re.search(
            "cuda|platform", ast.unparse(node.test)
        ):
            tops += [node.test, *(node.body if isinstance(node, ast.If) else [node.body])]
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            tops.append(node.returns)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            tops.append(node.annotation)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            tops.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            tops.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(WORDS):
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
            yield node, _changed(node, op=SWAPPED[type(node.op)]())
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, _changed(node, op=other)
        case ast.UnaryOp(op=ast.Not() | ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            if not (isinstance(parent, ast.keyword) and parent.arg in OF_NO_VALUE):
                yield node, str(not node.value)
        # Others are axes and places, which raise.
        case ast.Constant(value=int()) if isinstance(parent, ast.BinOp | ast.Compare | ast.Slice):
            yield node, f"({node.value + 1})"
        case ast.Constant(value=float()):
            yield node, f"({node.value * 2 or 1.0!r})"
        case ast.Attribute() if node.attr in RENAMED and getattr(parent, "func", None) is node:
            yield node, _changed(node, attr=RENAMED[node.attr])
        case ast.Name() if node.id in RENAMED and getattr(parent, "func", None) is node:
            yield node, RENAMED[node.id]
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.IfExp():
            yield node, _changed(node, body=node.orelse, orelse=node.body)
        case ast.If():
            yield node.test, "True"
            yield node.test, "False"


def _changed(node: ast.AST, **parts: object) -> str:
    changed = copy.copy(node)
    for name, part in parts.items():
        setattr(changed, name, part)
    source = ast.unparse(changed)
    return source if isinstance(node, ast.stmt) else f"({source})"


if __name__ == "__main__":
    main()
