"""Class distances of a hierarchy: how long the way is between two classes in a tree.

`labels.metrics` registers `Tree`. Names of classes alone decide its table, so that
`labels.measuring` does not measure it, and adds it to what `add` measures.
"""

from __future__ import annotations

import csv
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
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances
from otdd_flash.shown import display, listing


@dataclass(frozen=True)
class Tree(LabelMetric):
    """The length of the way between two classes in a tree, of both sides by name.

    Args:
        parents: the parent of every class and inner node, by name, None for the root; or (parent,
            length), with the length of the edge, 1 by default; or the path of a file: json of such
            a mapping, or csv with columns name, parent and perhaps length.
        power: the distance is the length to this power. Above 1 debiased values may be negative.
        add: a measured metric, or its name, whose distances are added; None: the tree alone.

    Raises:
        InputError: the tree has a cycle, a length below 0, or cannot be read.
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
            from otdd_flash.labels.metrics import metric_of

            added = metric_of(self.add)
            if added.fixed or isinstance(added, Tree):
                raise InputError(f"labels.add must be a method that measures, got {added.name}")
            object.__setattr__(self, "add", added)

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure what is added to the tree; see `LabelMetric.measure`."""
        return self.measured.measure(clouds, pairs, progress)

    @property
    def measured(self) -> LabelMetric:
        """What is added to the tree, or a metric that is 0."""
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
            InputError: a name is not in the tree, or two have no way between them.

        Warns:
            DataNotice: the power is above 1.
        """
        if self.power > 1:
            warn(
                f"labels.power={self.power:g}: powers above 1 of ways in a tree are no squared "
                "distances of points, so that debiased values may be negative",
                DataNotice,
            )
        edges = self.parents
        assert isinstance(edges, Mapping)
        ways = [_way(name, edges) for name in names]
        nodes = {node: place for place, node in enumerate(dict.fromkeys(chain(*ways)))}
        lengths = torch.tensor(
            [edges.get(node, (None, 0.0))[1] for node in nodes], dtype=torch.float64
        )
        above = torch.zeros(len(names), len(nodes), dtype=torch.float64)
        for row, way in enumerate(ways):
            above[row, [nodes[node] for node in way]] = 1
        if not bool((above @ above.T).all()):
            roots = sorted({way[-1] for way in ways})
            raise InputError(
                f"there is no way between classes below {listing(roots, 10)}, which have no "
                "parents; give them one"
            )
        # Edges above both count twice in the sum of both ways to the root.
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
    try:
        # Spreadsheets put a byte order mark before the first name.
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            entries = [(name, entry) for name, entry in json.loads(text, object_pairs_hook=list)]
        else:
            rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
            entries = [
                (row["name"], (row["parent"] or None, row.get("length") or 1.0)) for row in rows
            ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"labels.path={path} cannot be read: it must be json, the parent of every class by its "
            f"name, or csv with columns name, parent and perhaps length ({error})"
        ) from None
    found = dict(entries)
    if len(found) < len(entries):
        names = [name for name, _ in entries]
        twice = next(name for name in found if names.count(name) > 1)
        raise InputError(f"labels.path={path} lists {display(repr(twice))} twice; give one parent")
    return found


def _edges(given: Mapping[Any, Any]) -> dict[str, tuple[str | None, float]]:
    """Return the parent of every node and the length of the edge to it."""
    edges: dict[str, tuple[str | None, float]] = {}
    for name, entry in given.items():
        edge = entry if isinstance(entry, list | tuple) else (entry, 1.0)
        if len(edge) != 2:
            raise InputError(
                f"{display(repr(name))} must have a parent, or a pair (parent, length), in the "
                f"tree of labels=tree, got {shown(entry)}"
            )
        parent, length = edge
        try:
            edges[str(name)] = None if parent is None else str(parent), float(length)
        except (TypeError, ValueError):
            edges[str(name)] = None, math.nan
        if not 0 <= edges[str(name)][1] < math.inf:
            raise InputError(
                f"the edge above {display(repr(name))} must have a length of 0 or more, got "
                f"{display(repr(length))}"
            )
    for name in edges:
        _way(name, edges)
    return edges


def _way(name: str, edges: Mapping[str, Any]) -> list[str]:
    """Return the nodes from a class to its root, both included."""
    if name not in edges and all(parent != name for parent, _ in edges.values()):
        raise InputError(
            f"class {display(repr(name))} is not in the tree of labels=tree; add it with its parent"
        )
    way, node = [name], name
    while (parent := edges.get(node, (None, 0.0))[0]) is not None:
        if parent in way:
            raise InputError(f"the tree of labels=tree goes round from {display(repr(parent))}")
        way.append(parent)
        node = parent
    return way
