"""Class distances of a hierarchy: the length of the path between two classes in a tree.

`labels.metrics` registers `Tree`. Names of classes alone decide its table (`by_names`), so nothing
is measured or cached for it. `labels.measuring`, `flows.modes` and `ranking.bounds` add it to the
distances of the metric `add`; `gromov.distance` takes it alone.

Settings of studies, flows and indexes hold the digest in `to_dict`; `ranking.index` also stores
`parents`. If a change gives the same tree another digest, a study or flow with it cannot be
resumed.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, Progress
from otdd_flash.checks import shown
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import ClassCloud, PairDistances
from otdd_flash.shown import display, listing


@dataclass(frozen=True)
class Tree(LabelMetric):
    """The length of the path between two classes in a tree, found there by their names.

    Args:
        parents: the parent of every class and inner node, by name, None for the root; or (parent,
            length) or {"parent": parent, "length": length}, with the length of the edge, 1 by
            default; or the path of a file: json of such a mapping, or csv with columns name, parent
            and perhaps length. Spaces around names are ignored.
        power: the distance is the length to this power. Above 1 debiased values may be negative.
        add: a measured metric, or its name, whose distances are added; None: the tree alone.

    Raises:
        InputError: the tree has a cycle, a length below 0, or cannot be read.

    Warns:
        DataNotice: the power is above 1.
    """

    name = "tree"

    parents: Mapping[str, Any] | str | Path | None = None
    power: Positive = 1.0
    add: LabelMetric | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parents is None:
            raise InputError(
                "labels=tree needs the parent of every class: labels.path=FILE, a csv or json "
                "file, or otdd.labels.Tree(parents) in Python"
            )
        if not isinstance(self.parents, Mapping | str | Path):
            raise InputError(
                "labels.path must be the path of a file, or in Python parents a mapping from every "
                f"class to its parent, got {shown(self.parents)}"
            )
        given = self.parents if isinstance(self.parents, Mapping) else _read(Path(self.parents))
        object.__setattr__(self, "parents", _edges(given))
        if self.add is not None:
            from otdd_flash.labels.metrics import Given, metric_of

            # These need arguments of their own.
            named = self.add if self.add in (Given.name, Tree.name) else None
            added = None if named else metric_of(self.add)
            if added is None or added.fixed or isinstance(added, Tree):
                found = named if added is None else added.name
                raise InputError(f"labels.add must be a method that measures, got {found}")
            object.__setattr__(self, "add", added)
        if self.power > 1:
            warn(
                f"labels.power={self.power:g}: powers above 1 of paths in a tree are no squared "
                "distances of points, so that debiased values may be negative",
                DataNotice,
            )

    def __hash__(self) -> int:
        assert isinstance(self.parents, Mapping)
        return hash((frozenset(self.parents.items()), self.power, self.add))

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure what is added to the tree; see `LabelMetric.measure`."""
        return self.measured.measure(clouds, pairs, progress)

    @property
    def measured(self) -> LabelMetric:
        """The metric that is added to the tree, or one that is 0."""
        from otdd_flash.labels.metrics import NoLabels

        return self.add if isinstance(self.add, LabelMetric) else NoLabels()

    @property
    def epsilon(self) -> float | None:
        """The regularisation of what is added, if it has one."""
        found: float | None = getattr(self.measured, "epsilon", None)
        return found

    @property
    def single_samples_are_points(self) -> bool:
        """Whether what is added divides covariances by n - 1."""
        return self.measured.single_samples_are_points

    def by_names(self, names: Sequence[str]) -> Tensor:
        """Return the distances (V, V) between classes of these names.

        Raises:
            InputError: a name is not in the tree, or two have no path between them.
        """
        edges = self.parents
        assert isinstance(edges, Mapping)
        paths = [_path(name.strip(), edges) for name in names]
        nodes = {node: place for place, node in enumerate(dict.fromkeys(chain(*paths)))}
        lengths = torch.tensor(
            [edges.get(node, (None, 0.0))[1] for node in nodes], dtype=torch.float64
        )
        above = torch.zeros(len(names), len(nodes), dtype=torch.float64)
        for row, path in enumerate(paths):
            above[row, [nodes[node] for node in path]] = 1
        if not bool((above @ above.T).all()):
            roots = sorted({path[-1] for path in paths})
            raise InputError(
                f"there is no path between classes below {listing(roots, 10)}, which have no "
                "parents; give them one"
            )
        # Edges above both count twice in the sum of both paths to the root.
        shared = (above * lengths) @ above.T
        found = (shared.diagonal()[:, None] + shared.diagonal() - 2 * shared).clamp_min(0)
        return found.pow(self.power).fill_diagonal_(0)

    def to_dict(self) -> dict[str, Any]:
        """Return power and added metric, and a digest of the tree."""
        assert isinstance(self.parents, Mapping)
        text = json.dumps(sorted(self.parents.items())).encode()
        digest = content_hash({"tree": torch.frombuffer(bytearray(text), dtype=torch.uint8)})
        added = {} if self.add is None else {"add": self.measured.name, **self.measured.to_dict()}
        return {"tree": digest, "power": self.power, **added}


def _read(path: Path) -> Mapping[str, Any]:
    what = f"labels.path={path}"
    try:
        # Spreadsheets put a byte order mark before the first name.
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            found = json.loads(text, object_pairs_hook=lambda pairs: _distinct(pairs, what))
            if not isinstance(found, dict):
                raise TypeError("it is no mapping")
            return found
        # Names may have line breaks.
        rows = csv.reader(io.StringIO(text, newline=""))
        header, *lines = ([field.strip() for field in row] for row in rows if row)
        name, parent = header.index("name"), header.index("parent")
        length = header.index("length") if "length" in header else None
    except InputError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{what} cannot be read: it must be json, the parent of every class by its "
            f"name, or csv with columns name, parent and perhaps length ({error})"
        ) from None
    if any(len(line) > len(header) for line in lines):
        raise InputError(f"{what} has rows of more fields than its first line names")
    entries = []
    for line in lines:
        fields = [*line, *[""] * (len(header) - len(line))]
        if not fields[name]:
            raise InputError(f"{what} has a row without a name, {shown(line)}")
        given = fields[length] if length is not None else ""
        entries.append((fields[name], (fields[parent] or None, given or 1.0)))
    return _distinct(entries, what)


def _distinct(entries: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Return pairs as a mapping; refuse a name that is there twice."""
    found = dict(entries)
    if len(found) < len(entries):
        names = [name for name, _ in entries]
        twice = next(name for name in found if names.count(name) > 1)
        raise InputError(f"{what} lists {display(repr(twice))} twice; give one parent")
    return found


def _edges(given: Mapping[Any, Any]) -> dict[str, tuple[str | None, float]]:
    """Return the parent of every node and the length of the edge to it."""
    edges: dict[str, tuple[str | None, float]] = {}
    for key, entry in given.items():
        if not (name := str(key).strip()):
            raise InputError("a name in the tree of labels=tree is empty; leave it out")
        if name in edges:
            raise InputError(f"{display(repr(name))} is in the tree of labels=tree twice")
        parent, length = _edge(name, entry)
        parent = None if parent is None else str(parent).strip() or None
        try:
            # A truth value is no length.
            number = math.nan if isinstance(length, bool) else float(length)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise InputError(
                f"the edge above {display(repr(name))} must have a length of 0 or more, got "
                f"{display(repr(length))}"
            )
        edges[name] = parent, number
    for name in edges:
        _path(name, edges)
    return edges


def _edge(name: str, entry: Any) -> tuple[Any, Any]:
    """Return the parent of a node and the length of the edge to it, as they are given."""
    below = ""
    if isinstance(entry, Mapping):
        if "parent" in entry and {*entry} <= {"parent", "length"}:
            return entry["parent"], entry.get("length", 1.0)
        child = display(repr(next(iter(entry), "child")))
        below = (
            ", and not the names below it; give the parent of every class, such as "
            f"{child}: {display(repr(name))}"
        )
    elif not isinstance(entry, list | tuple):
        return entry, 1.0
    elif len(entry) == 2:
        return entry[0], entry[1]
    raise InputError(
        f"{display(repr(name))} must have a parent, a pair (parent, length) or a mapping with "
        f"parent and length, in the tree of labels=tree{below}; got {shown(entry)}"
    )


def _path(name: str, edges: Mapping[str, Any]) -> list[str]:
    """Return the nodes from a class to its root, both included."""
    if name not in edges and all(parent != name for parent, _ in edges.values()):
        raise InputError(
            f"class {display(repr(name))} is not in the tree of labels=tree; add it with its parent"
        )
    path, node = [name], name
    while (parent := edges.get(node, (None, 0.0))[0]) is not None:
        if parent in path:
            raise InputError(f"the tree of labels=tree has a cycle through {display(repr(parent))}")
        path.append(parent)
        node = parent
    return path
