"""Which measured files are older than the code that they measure.

    python -m experiments.freshness [--older]

For every committed `experiments/results/NAME.json` and every commit that its rows name: is the code
that was measured still the code of HEAD? The code is that of the script which writes the file, and
of all modules that the script imports, directly or through others. Modules that only draw, print or
write (`REPORTING`, and all that import matplotlib) are left out.

What is compared are the syntax trees of top-level functions, classes and assignments, without
docstrings and imports. A file is older if one of HEAD's trees is nowhere in the recorded commit,
which has another definition of that name. So a move to another module, a comment or a docstring is
no change. Nor is a new name: where it is used, the definition that uses it has changed as well.

`make benchmarks` runs this. It informs, so it always ends with exit code 0.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "experiments/results"
PACKAGES = ("otdd_flash", "experiments")
# A link in the package leads there; see `tool.setuptools.package-dir`.
KERNELS = "otdd_flash.kernels"
# Folders and modules that take no part in what is measured.
REPORTING = (
    "otdd_flash.report",
    "otdd_flash.commands",
    "otdd_flash.integrations",
    "experiments.environment",
    "experiments.rows",
)
# Pages whose links make a file part of what is shown.
PAGES = re.compile(r"README\.md|docs/[^/]+\.md|experiments/README\.md")
SHOWN_NAMES = 3
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
UNKNOWN = "commit unknown"


class Entry(NamedTuple):
    """One commit of one file of results."""

    file: str
    commit: str
    day: str
    hardware: str
    state: str


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Print the table, and which files no page links to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--older", action="store_true", help="list only files older than the code")
    given = parser.parse_args(arguments)
    repository = Repository(root)
    if repository.tree("HEAD") is None:
        sys.stdout.write("There is no history here to compare with: this is no git repository.\n")
        return
    table = Table("file", "commit", "day", "hardware", "the code since")
    for entry in entries(repository):
        if not given.older or entry.state.startswith("older"):
            table.add_row(*entry)
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False)
    console.print(table)
    alone = unlinked(repository)
    if alone and not given.older:
        console.print(f"No page links to: {', '.join(alone)}")


def entries(repository: Repository) -> Iterator[Entry]:
    """Yield one entry for every file and every commit of its rows, in the order of names."""
    now = repository.tree("HEAD")
    assert now is not None
    writers = {path: patterns(now.source(path)) for path in now.scripts()}
    for path in now.results():
        content = json.loads(now.source(path))
        name = Path(path).stem
        script = writer(name, writers)
        for commit in commits(content) or [""]:
            then = repository.tree(commit) if commit else None
            if then is None:
                state = UNKNOWN
            elif script is None:
                state = "no script writes it"
            else:
                state = _state(changes(now, then, script))
            day = repository.day(commit) if then is not None else ""
            yield Entry(name, commit or "none recorded", day, hardware(content), state)


def unlinked(repository: Repository) -> list[str]:
    """Names of the result files to which no page links."""
    now = repository.tree("HEAD")
    assert now is not None
    pages = "\n".join(now.source(path) for path in now.blobs if PAGES.fullmatch(path))
    return [Path(path).stem for path in now.results() if f"results/{Path(path).name})" not in pages]


def _state(names: list[str]) -> str:
    if not names:
        return "current"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"older than {', '.join(names[:SHOWN_NAMES])}{more}"


# What a file says of itself.


def commits(content: Any) -> list[str]:
    """Return the commits that a file names, in its order: those of its rows, else of its head."""
    rows = content.get("rows")
    rows = rows if isinstance(rows, list) else []
    found = [row.get("commit") if isinstance(row, dict) else None for row in rows]
    if not found or None in found:
        runs = content.get("runs", ())
        heads = [content, *(run for run in runs if isinstance(run, dict))]
        found += [head.get("environment", head).get("commit") for head in heads]
    return [*dict.fromkeys(commit for commit in found if commit)]


def hardware(content: Any) -> str:
    """Return the name of the GPU, or the processor with its cores."""
    runs = content.get("runs") or [{}]
    known = content.get("environment") or (content if "processor" in content else runs[0])
    known = known.get("environment", known)
    if known.get("gpu"):
        return str(known["gpu"])
    cores = known.get("cores")
    return f"{known.get('processor') or 'not recorded'}{f', {cores} cores' if cores else ''}"


# Which script writes a file.


def writer(name: str, writers: dict[str, set[str]]) -> str | None:
    """Return the path of the script whose pattern fits a name best, or None."""
    fits = [
        (len(pattern.replace(".+", "")), path)
        for path, found in writers.items()
        for pattern in found
        if re.fullmatch(pattern, name)
    ]
    return max(fits)[1] if fits else None


def patterns(source: str) -> set[str]:
    """Return regular expressions of the names that a script gives to `write_result` or `Rows`."""
    tree = ast.parse(source)
    ours = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments.")
        for name in node.names
        if name.name in ("write_result", "Rows")
    }
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                assigned.setdefault(target, []).append(value)
    return {
        pattern
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", None) in ours
        for pattern in _texts(node.args[0], assigned)
        if pattern.replace(".+", "")
    }


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for one, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(one, ast.Name):
                    yield one.id, value


def _texts(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> list[str]:
    """Return a regular expression for every text that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.escape(text)]
        case ast.Name(id=name) if name in assigned:
            # Without its own name, so that `name = name + ...` ends.
            others = {key: values for key, values in assigned.items() if key != name}
            return [text for value in assigned[name] for text in _texts(value, others)]
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body, assigned), *_texts(other, assigned)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, assigned)]
        case ast.FormattedValue(value=value):
            return _texts(value, assigned)
        case ast.JoinedStr(values=values):
            parts = [_texts(value, assigned) for value in values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        case _:
            return [".+"]


# What a file measures, and what of it has changed.


def changes(now: Tree, then: Tree, script: str) -> list[str]:
    """Return the names whose definitions changed, those nearest to the script first."""
    old = {*then.blobs.values()}
    changed = []
    for path in now.measured(script):
        if now.blobs[path] in old:
            continue
        module = now.module(path)
        for name in module.definitions:
            before = [tree for other in then.defining(name) for tree in other.trees(name)]
            if before and not {*module.trees(name)} <= {*before}:
                changed.append(name)
    return [*dict.fromkeys(changed)]


class Repository:
    """The trees of a git repository's commits, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, Tree | None] = {}
        self._modules: dict[str, Module] = {}
        self._sources: dict[str, str] = {}

    def tree(self, commit: str) -> Tree | None:
        """Return the files of a commit, or None where the history does not have it."""
        if commit not in self._trees:
            listed = self._git("ls-tree", "-r", commit)
            self._trees[commit] = None if listed is None else Tree(self, _blobs(listed))
        return self._trees[commit]

    def day(self, commit: str) -> str:
        """Return the day of a commit."""
        return (self._git("show", "-s", "--format=%cs", commit) or "").strip()

    def sources(self, blobs: Sequence[str]) -> dict[str, str]:
        """Return the text of each blob."""
        wanted = [blob for blob in dict.fromkeys(blobs) if blob not in self._sources]
        if wanted:
            command = ["git", "-C", str(self._root), "cat-file", "--batch"]
            request = "".join(f"{blob}\n" for blob in wanted).encode()
            answer = subprocess.run(command, input=request, capture_output=True, check=True).stdout
            start = 0
            for blob in wanted:
                # "BLOB blob SIZE", a line break, the text and another line break.
                end = answer.index(b"\n", start)
                size = int(answer[start:end].split()[2])
                self._sources[blob] = answer[end + 1 : end + 1 + size].decode("utf-8", "replace")
                start = end + 2 + size
        return self._sources

    def module(self, blob: str) -> Module:
        """Return what a Python file defines and imports."""
        if blob not in self._modules:
            self._modules[blob] = Module(self.sources([blob])[blob])
        return self._modules[blob]

    def _git(self, *arguments: str) -> str | None:
        command = ["git", "-C", str(self._root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None


class Tree:
    """The files of one commit: its modules, and what they import and define."""

    def __init__(self, repository: Repository, blobs: dict[str, str]) -> None:
        self.blobs = blobs
        self._repository = repository
        self._paths = {
            _dotted(path): path
            for path in blobs
            if path.endswith(".py") and _dotted(path).split(".")[0] in PACKAGES
        }
        # Folders without __init__.py are packages too.
        self._folders = {_dotted(str(folder)) for path in blobs for folder in Path(path).parents}

    def source(self, path: str) -> str:
        """Return the text of a file."""
        blob = self.blobs[path]
        return self._repository.sources([blob])[blob]

    def module(self, path: str) -> Module:
        """Return what a Python file defines and imports."""
        return self._repository.module(self.blobs[path])

    def results(self) -> list[str]:
        """Return the paths of the files of results."""
        return [path for path in self.blobs if re.fullmatch(rf"{RESULTS}/[^/]+\.json", path)]

    def scripts(self) -> list[str]:
        """Return the paths of the scripts."""
        return [path for path in self.blobs if re.fullmatch(r"experiments/\w+\.py", path)]

    def defining(self, name: str) -> list[Module]:
        """Return the modules that define a name."""
        return self._defining.get(name, [])

    @cached_property
    def _defining(self) -> dict[str, list[Module]]:
        self._repository.sources([self.blobs[path] for path in self._paths.values()])
        found: dict[str, list[Module]] = {}
        for path in self._paths.values():
            for name in self.module(path).definitions:
                found.setdefault(name, []).append(self.module(path))
        return found

    def measured(self, script: str) -> list[str]:
        """Return the paths of a script and of all modules that it imports, the nearest first."""
        paths = [script]
        for path in paths:
            reached = self._imported(path)
            paths += [other for other in reached if other not in paths]
        return paths

    def _imported(self, path: str) -> list[str]:
        module, reached = self.module(path), []
        for bound, target in module.imports:
            chains = module.chains.get(bound, []) if self._is_package(target) else [()]
            reached += [self._home(target, chain) for chain in chains]
        return [
            self._paths[name]
            for name in dict.fromkeys(reached)
            if name in self._paths and not self._reports(name)
        ]

    def _home(self, target: str, chain: tuple[str, ...] = ()) -> str:
        """Return the module that defines `target.chain`, found through packages that import it."""
        module = ""
        for name in (*target.split("."), *chain):
            inner = f"{module}.{name}".lstrip(".")
            if inner in self._paths or inner in self._folders:
                module = inner
                continue
            known = self.module(self._paths[module]) if module in self._paths else None
            if known is None or not self._is_package(module) or name not in known.bound:
                break
            if known.bound[name] == inner:
                break
            return self._home(known.bound[name])
        return module

    def _is_package(self, name: str) -> bool:
        return self._paths.get(name, "").endswith("__init__.py")

    def _reports(self, name: str) -> bool:
        if any(name == left or name.startswith(f"{left}.") for left in REPORTING):
            return True
        return self.module(self._paths[name]).draws


class Module:
    """What one Python file defines and imports.

    `imports` are the (name, dotted target) of our own modules or of names in them; `bound` has
    those for type checkers too, which is where the lazy names of a package are found. `chains` are
    the attributes that are taken of a name.
    """

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._trees: dict[str, list[str]] = {}

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [*ast.walk(self._tree)]

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        checked = {
            inner
            for node in self._nodes
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for child in node.body
            for inner in ast.walk(child)
        }
        nodes = (node for node in self._nodes if node not in checked)
        return [pair for node in nodes for pair in _imports_of(node)]

    @cached_property
    def bound(self) -> dict[str, str]:
        return dict(pair for node in self._nodes for pair in _imports_of(node))

    @cached_property
    def draws(self) -> bool:
        """Whether the module imports matplotlib."""
        names = [name for node in self._nodes for name in _modules_of(node)]
        return any(name.startswith("matplotlib") for name in names)

    @cached_property
    def chains(self) -> dict[str, list[tuple[str, ...]]]:
        found: dict[str, list[tuple[str, ...]]] = {}
        for names in map(_chain, self._nodes):
            if len(names) > 1:
                found.setdefault(names[0], []).append(names[1:])
        return found

    @cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        """Every top-level function, class and assignment, by name."""
        found: dict[str, list[ast.stmt]] = {}
        for node in _top_level(self._tree):
            for name in _names(node):
                found.setdefault(name, []).append(node)
        return found

    def trees(self, name: str) -> list[str]:
        """Return what a name is defined as, as text that comments and docstrings do not change."""
        if name not in self._trees:
            # An imported name in lower case that has attributes is a module.
            modules = {one for one in self.bound if one.islower()}
            self._trees[name] = [_text(node, modules) for node in self.definitions[name]]
        return self._trees[name]


def _text(node: Any, modules: set[str]) -> str:
    """Write a syntax tree without docstrings, imports and the modules in front of names."""
    if isinstance(node, list):
        kept = (one for one in node if not isinstance(one, ast.Import | ast.ImportFrom))
        return f"[{' '.join(_text(one, modules) for one in kept)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Name):
        return f"(Name {node.id!r})"
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
        return f"(Name {node.attr!r})"
    fields = dict(ast.iter_fields(node))
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    parts = (f"{key}={_text(value, modules)}" for key, value in fields.items() if key != "ctx")
    return f"({type(node).__name__} {' '.join(parts)})"


def _imports_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the bound name and the dotted target of our own modules that a statement imports."""
    if isinstance(node, ast.Import):
        for name in node.names:
            if name.name.split(".")[0] in PACKAGES:
                plain = name.asname or name.name.split(".")[0]
                yield plain, name.name
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
        for name in node.names:
            yield name.asname or name.name, f"{node.module}.{name.name}"


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def _chain(node: ast.AST) -> tuple[str, ...]:
    """Return the names of `a.b.c`, or nothing for another expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return (*before, node.attr) if before else ()
    return ()


def _top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those inside of conditions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _top_level(node)
        elif isinstance(node, ast.stmt):
            yield node


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [
        leaf.id
        for target in targets
        if target
        for leaf in ast.walk(target)
        if isinstance(leaf, ast.Name)
    ]
    return [name for name in names if name != "__all__"]


def _blobs(listed: str) -> dict[str, str]:
    """Return {path: blob} of the lines of `git ls-tree -r`."""
    pairs = (line.split("\t") for line in listed.splitlines())
    return {path: facts.split()[2] for facts, path in pairs}


def _dotted(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.replace("kernels", KERNELS, 1) if name.split(".")[0] == "kernels" else name


if __name__ == "__main__":
    main()
