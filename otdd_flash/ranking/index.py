"""An index of datasets: epsilon and settings fixed once, and of every member its self term.

`index` builds or extends one, in memory or in a folder. `commands.nearest`, `ranking.race` and
users call it, and the race reads its members. Values compare because a query takes epsilon, cost
and method of class distances as they were when the index was built.

A folder holds `index.json`, which names members before they are solved, and two files for each
member, named after its digest: its numbers, and its rows, which are read when a query needs them.
Every file must appear whole or not at all, so that a killed build goes on where it was. Checksums
find what is damaged: a member's numbers are computed again from its rows, damaged rows are reported
until the dataset is given again, and a damaged index.json is refused.

Keys of `Settings.to_dict` and of members' files are the format: indices of earlier versions stay
readable, or `INDEX_FORMAT` rises. A new key of settings changes `Settings.mark`, by which all
entries of earlier indices are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, Progress, takes
from otdd_flash.arguments import samples as samples_of
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import as_samples
from otdd_flash.data.registry import SOURCES, load
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, placed, warn
from otdd_flash.files.atomic import cannot_write, lock, unlock, write_json
from otdd_flash.files.tensor_file import (
    CHECKSUM,
    DamagedFileError,
    check_format,
    checksum,
    content_hash,
    read_tensors,
    write_tensors,
)
from otdd_flash.label_sets import named_sets
from otdd_flash.labels import (
    drop_small_classes,
    measure_classes,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.metrics import (
    POOLED,
    Continuous,
    Given,
    Labels,
    NoLabels,
    PairFunction,
    metric_named,
    numbered,
    scale_of,
    targets_of,
    with_numbers,
)
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.metrics.tree import Tree
from otdd_flash.operators.comparison import Comparison
from otdd_flash.ranking.bounds import (
    Moments,
    Problem,
    SelfTerm,
    Terms,
    class_tables,
    moments_of,
    self_terms,
    spread,
)
from otdd_flash.result import versions
from otdd_flash.samples import TENSORS, LabeledSamples, check_squares
from otdd_flash.shown import listing
from otdd_flash.solver.penalties import penalties_of, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import schedule_of
from otdd_flash.solver.term import resolve_epsilon

INDEX_FILE, LOCK_FILE, INDEX_FORMAT = "index.json", ".lock", 1
NO_MEMBER = "no dataset of the library can be a member of the index"
# Members that are read, solved and written together.
TOGETHER = 64
# Members, drawn at random, of which neighbours in that order give the mean cost.
MEAN_OF = 16


@dataclass(frozen=True)
class Settings:
    """The settings on which all values of an index depend.

    Attributes:
        epsilon: in units of the cost; 0 is exact transport.
        mean_cost: the mean over sampled pairs of members, from which a relative epsilon came.
        cost: the ground cost.
        metric: how class distances are measured, with an epsilon of its own if it takes one.
        unbalanced: rho, the price of mass that is not matched; None where marginals are exact.
        dim: the number of features; None before it is settled.
        min_class_size: classes with fewer samples were dropped.
        precision: of the passes.
    """

    epsilon: float
    mean_cost: float
    cost: GroundCost
    metric: LabelMetric
    unbalanced: float | None
    dim: int | None
    min_class_size: int | None
    precision: str

    def terms(self, compute: ComputeOptions) -> Terms:
        """Return what solves terms at these settings, in one process."""
        constraints = resolve_constraints(self.unbalanced, None, lambda: 1.0)
        scale = scale_of(self.metric)
        return Terms(self.cost, self.epsilon, constraints, compute.alone, scale)

    def on(self, compute: Compute | None) -> ComputeOptions:
        """Return options of passes, of these settings' precision where only a device is given.

        Raises:
            InputError: options of another precision.
        """
        if not isinstance(compute, ComputeOptions):
            return replace(ComputeOptions.of(compute), precision=self.precision)
        if compute.precision != self.precision:
            raise InputError(
                f"the index was built with precision={self.precision}, got {compute.precision}; "
                "give the same, or build another index"
            )
        return compute

    def transformed(self, samples: LabeledSamples, compute: ComputeOptions) -> LabeledSamples:
        """Return samples on the device, transformed for the ground cost."""
        return self.cost.transform(samples.to(resolve_device(compute.device)))

    def prepared(self, samples: LabeledSamples) -> LabeledSamples:
        """Return samples as members and queries are: in memory, checked, without small classes.

        Raises:
            InputError: they cannot be compared at these settings.
        """
        features = samples.points_of(slice(None)).to("cpu")
        found = replace(samples.to("cpu"), features=features)
        check_squares(found)
        if isinstance(self.metric, Continuous):
            found = numbered(found)
            own, scale = targets_of(found).shape[1], self.metric.scale
            if isinstance(scale, tuple) and own != len(scale):
                raise InputError(
                    f"{found.name} has {own} numbers for each row, and the index compares "
                    f"{len(scale)}; give the same to all"
                )
        elif not isinstance(self.metric, NoLabels) and found.labels is None:
            said = "no labels" if found.targets is None else "numbers and no classes"
            other = "none" if found.targets is None else "continuous"
            raise InputError(
                f"{found.name} has {said}, which labels={self.metric.name} of the index needs; "
                f"label it, or build the index with labels={other}"
            )
        found = drop_small_classes(found, self.min_class_size)
        self.cost.transform(found)
        notice_single_samples([found], self.metric)
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords with which `dataset_distance` and `index` have these settings."""
        shared = ("epsilon", "unbalanced", "min_class_size")
        given = {name: getattr(self, name) for name in shared}
        cost = {name: getattr(self.cost, name) for name in ("lambda_x", "lambda_y", "ground")}
        return {**given, **cost, "labels": self.metric}

    @property
    def mark(self) -> str:
        """A digest, by which entries of other settings are told apart."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON's types."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        labels = {"method": self.metric.name, **self.metric.to_dict()}
        if isinstance(self.metric, Tree):
            labels["parents"] = self.metric.parents
        return {**content, "cost": self.cost.to_dict(), "metric": labels}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Settings:
        """Restore the settings of `to_dict`."""
        labels = dict(content["metric"])
        if labels.get("add") is not None:
            labels["add"] = metric_named(labels["add"], labels)
        metric = metric_named(labels.pop("method"), labels)
        return cls(**{**content, "cost": GroundCost(**content["cost"]), "metric": metric})


@dataclass(frozen=True, eq=False)
class Entry:
    """A member of an index.

    Attributes:
        name: in the library.
        digest: of its rows, without small classes.
        term: its self term.
        moments: of its transformed rows.
    """

    name: str
    digest: str
    term: SelfTerm
    moments: Moments


def digest_of(samples: LabeledSamples) -> str:
    """Return a digest of rows in their order, with labels, numbers, names and weights.

    Of features the values count, not their type. Unless a label set has no row, it is equal where
    `LabeledSamples.fingerprint` is, which digests each row by itself and takes several times as
    long.
    """
    features = samples.features
    narrow = features.float()
    if features.dtype != torch.float32 and not torch.equal(narrow.to(features.dtype), features):
        narrow = features
    # -0 becomes 0.
    parts = {"features": narrow + 0, "labels": samples.labels, "weights": samples.weights}
    parts |= {"targets": samples.targets, "members": samples.members}
    content = content_hash({name: part for name, part in parts.items() if part is not None})
    return hashlib.sha256(json.dumps([content, samples.label_names]).encode()).hexdigest()


@dataclass(frozen=True, eq=False, repr=False)
class Index:
    """A library of datasets with their solved self terms, to be ranked by `otdd.nearest`.

    Attributes:
        settings: the settings that all distances depend on, such as epsilon.
        entries: the members, in the order of the library; datasets of equal content once.
        compute: where and how distances are computed.
        folder: where it is stored; None in memory.
        held: the members whose rows are in memory, by digest.
        duplicates: for each dataset that equals an earlier member: its name and that of the member.
        lost: names of members whose numbers and rows in the folder are missing or damaged.
    """

    settings: Settings
    entries: tuple[Entry, ...]
    compute: ComputeOptions
    folder: Path | None
    held: Mapping[str, LabeledSamples]
    duplicates: Mapping[str, str]
    lost: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Index({len(self)} datasets, epsilon={self.settings.epsilon:.6g})"

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(entry.name for entry in self.entries)

    @property
    def dim(self) -> int:
        """The number of features."""
        assert self.settings.dim is not None
        return self.settings.dim

    @property
    def members(self) -> dict[str, LabeledSamples | _StoredRows]:
        """The members as `index` takes them: rows in memory, or references to the folder."""
        return {
            one.name: self.held.get(one.digest) or _StoredRows(self.folder, one.digest, one.name)
            for one in self.entries
        }

    def rows(self, entry: Entry) -> LabeledSamples:
        """Return the rows of a member as they were given.

        Raises:
            InputError: its file is missing or damaged.
        """
        found = self.held.get(entry.digest)
        return found or _StoredRows(self.folder, entry.digest, entry.name).read()

    @classmethod
    @takes()
    def load(cls, folder: str | Path, compute: Compute | None = None) -> Index:
        """Read the folder of an index; members whose numbers are damaged are computed again.

        Args:
            folder: as `otdd.index` wrote it.
            compute: where and how distances are computed, or only a device.

        Raises:
            InputError: there is no index, or a later version wrote it.

        Warns:
            DataNotice: a member was left out: its numbers and its rows are missing or damaged.
        """
        where = Path(folder)
        if (stored := _read_index(where)) is None:
            raise InputError(f"there is no index in {where}; otdd.index builds one")
        settings = Settings.from_dict(stored["settings"])
        members = _stored_members(stored, where)
        reader = _Reader(members, settings, settings.on(compute), False)
        return _build(reader, where, stored, None, None)


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes out.
@computes
@takes()
def index(
    library: Mapping[str, Any],
    folder: str | Path | None = None,
    *,
    epsilon: NotNegative | None = None,
    epsilon_relative: NotNegative | None = None,
    labels: Labels = "gaussian",
    min_class_size: Count | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative = 0.5,
    ground: Ground = "sqeuclidean",
    unbalanced: Positive | None = None,
    unbalanced_relative: Positive | None = None,
    dim: Count | None = None,
    rebuild: bool = False,
    skip: bool = False,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Index:
    """Build an index of datasets for `otdd.nearest`, which solves their self terms once.

    Args:
        library: datasets of one dimension by name: samples, arrays (features, labels), any datasets
            of vectors that `otdd.embed` takes, names of datasets for `otdd.load`, or files that its
            reader `arrays` takes. They are added to those in `folder`. {} adds none: it reads the
            folder and checks the settings, which `Index.load` does not ask for.
        folder: where to store the index; None: in memory. Members that the folder holds are not
            computed again; a name that comes with other rows gets these.
        epsilon: entropic regularisation, in units of the cost; it stays that of the index.
        epsilon_relative: the same as a multiple of the mean cost over sampled pairs of members.
            Neither given means 0.01 of that mean; 0 is the unregularised cost.
        labels: how distances between classes are measured, as for `dataset_distance`; with `folder`
            only by a named method.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features, or of the `ground` cost.
        lambda_y: weight of the squared distance between classes.
        ground: the cost between features, as for `dataset_distance`.
        unbalanced: rho, the price of mass that is not matched, in units of the cost.
        unbalanced_relative: the same as a multiple of the mean cost over sampled pairs of members.
        dim: the number of features of members; by default that of the folder, or of most of the
            members from which the mean cost is estimated.
        rebuild: if the folder has other settings, compute everything again; False raises.
        skip: leave out datasets that cannot be members, with a notice, instead of refusing them.
        compute: `otdd.ComputeOptions`, or only a device.
        cache_dir: folder of a database of measured class distances.
        progress: called as progress(members done, their total).

    Returns:
        The index.

    Raises:
        InputError: the request cannot be met; the message says what to change.

    Warns:
        DataNotice: members have equal content or were left out, or files are damaged.
    """
    cost, metric = GroundCost(lambda_x, lambda_y, ground), metric_of(labels)
    options, epsilon, epsilon_relative = schedule_of(None, epsilon, epsilon_relative)
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=True, ground=ground)
    cost.check_labels(metric.name)
    if isinstance(metric, Given) or (folder is not None and isinstance(metric, PairFunction)):
        raise InputError(
            f"an index measures class distances of queries to come; labels={metric.name} cannot "
            "be stored for that: take a named method, such as gaussian"
        )
    where = None if folder is None else Path(folder)
    stored = None if where is None else _read_index(where)
    if not library and stored is None:
        raise InputError(
            "the library is empty: give datasets by name, {name: dataset}"
            + ("" if where is None else f", as there is no index in {where}")
        )
    # The rows in the folder are enough for members that are not given again.
    whole = {**_stored_members(stored, where), **library}
    passes = ComputeOptions.of(compute)
    asked = Settings(0.0, 0.0, cost, metric, unbalanced, dim, min_class_size, passes.precision)
    if stored is None or rebuild:
        _refuse_dropped(stored, whole, min_class_size)
        reader = _Reader(whole, asked, passes, skip)
        built = reader.settled(epsilon, epsilon_relative, unbalanced, unbalanced_relative)
    else:
        built = Settings.from_dict(stored["settings"])
        passes = built.on(compute)
        if epsilon_relative is not None:
            epsilon = epsilon_relative * built.mean_cost
        if unbalanced_relative is not None:
            asked = replace(asked, unbalanced=unbalanced_relative * built.mean_cost)
        _refuse_other(built, replace(asked, epsilon=built.epsilon if epsilon is None else epsilon))
    return _build(_Reader(whole, built, passes, skip), where, stored, cache_dir, progress)


def _stored_members(stored: Mapping[str, Any] | None, where: Path | None) -> dict[str, Any]:
    members = {} if stored is None else stored["members"]
    return {name: _StoredRows(where, key, name) for name, key in members.items()}


def _refuse_dropped(
    stored: Mapping[str, Any] | None, library: Mapping[str, Any], least: int | None
) -> None:
    """Raise an `InputError` if rows that were dropped from stored members are asked for again."""
    dropped = 0 if stored is None else stored["settings"]["min_class_size"] or 0
    left = [name for name, given in library.items() if isinstance(given, _StoredRows)]
    if left and dropped > max(1, least or 1):
        raise InputError(
            f"the index holds its members without classes below min_class_size={dropped}; give "
            f"those again to rebuild it with smaller ones: {listing(left, 8)}"
        )


def _refuse_other(built: Settings, asked: Settings) -> None:
    """Raise an `InputError` if an index was built with other settings than are asked for now."""
    # Values that the index has settled: an epsilon of class distances, the scale of numbers.
    epsilon = getattr(built.metric, "epsilon", None) or 1.0
    asked = replace(asked, metric=settled_metric(asked.metric, epsilon, ()))
    if isinstance(asked.metric, Continuous) and isinstance(built.metric, Continuous):
        assert isinstance(built.metric.scale, tuple)
        scale = asked.metric.scale
        if scale is None:
            scale = (1.0,) * len(built.metric.scale)
        elif scale == POOLED or not isinstance(scale, tuple):
            scale = built.metric.scale
        asked = replace(asked, metric=Continuous(scale))
    if asked.metric != built.metric:
        raise InputError(
            f"the index was built with labels={built.metric}, not {asked.metric}; take another "
            "folder, or set rebuild=true"
        )
    for name in ("epsilon", "cost", "unbalanced", "dim", "min_class_size"):
        own, given = (one.to_dict()[name] for one in (built, asked))
        if given not in (own, None):
            raise InputError(
                f"the index was built with {name}={own}, not {given}, and values at different "
                "settings do not compare; give the same, take another folder, or set rebuild=true "
                "to compute all self terms again"
            )


@dataclass(frozen=True)
class _Reader:
    """Reads members of a library as samples, checked, one at a time.

    Attributes:
        library: the members by name.
        settings: of the index.
        compute: where passes run.
        skip: leave out, with a notice, what cannot be a member.
    """

    library: Mapping[str, Any]
    settings: Settings
    compute: ComputeOptions
    skip: bool

    def settled(
        self,
        epsilon: float | None,
        relative: float | None,
        unbalanced: float | None,
        unbalanced_relative: float | None,
    ) -> Settings:
        """Settle the number of features, and relative values by the mean cost over some pairs."""
        order = np.random.default_rng(0).permutation(len(self.library))[:MEAN_OF]
        names, cost = list(self.library), self.settings.cost
        drawn = [names[place] for place in sorted(order)]
        with warnings.catch_warnings(record=True) as said:
            # They are read again, with notices, when all are.
            warnings.simplefilter("always")
            read = [samples for _, samples in self.read(drawn)]
        if not read:
            raise InputError(": ".join([NO_MEMBER, *(str(one.message) for one in said[:1])]))
        # The most frequent number of features; of equally frequent ones the first.
        ((dim, _),) = Counter(one.dim for one in read).most_common(1)
        some = [self.settings.transformed(one, self.compute) for one in read if one.dim == dim]
        metric, some = with_numbers(self.settings.metric, some)
        metric = settled_metric(metric, epsilon, some)
        alone, scale = self.compute.alone, scale_of(metric)
        means = [
            Comparison.prepare(pair, cost, alone, transformed=True, target_scale=scale)
            .with_classes(measure_classes(*pair, metric).full)
            .mean_cost()
            for pair in list(pairwise(some)) or [(some[0], some[0])]
        ]
        mean = sum(means) / len(means)
        *_, used = resolve_epsilon(epsilon, relative, lambda: mean)
        limits = resolve_constraints(unbalanced, unbalanced_relative, lambda: mean)
        rho = None if limits.exact else (penalties_of(limits) or [None])[0]
        settled = replace(self.settings, epsilon=used, mean_cost=mean, unbalanced=rho)
        return replace(settled, metric=metric, dim=dim)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, LabeledSamples]]:
        """Yield members by name, of one dimension if it is settled, without small classes.

        Raises:
            InputError: one cannot be a member, unless such are skipped.
        """
        for name in names:
            try:
                found = self._one(name)
                if (dim := self.settings.dim) not in (None, found.dim):
                    raise InputError(
                        f"{name} has {found.dim} features, and the index compares {dim}; leave it "
                        "out, embed all alike, or set skip=true"
                    )
            except InputError as error:
                if not (self.skip or isinstance(self.library[name], _StoredRows)):
                    raise
                warn(f"{error}: it is left out of the index", DataNotice)
                continue
            yield name, found

    def _one(self, name: str) -> LabeledSamples:
        given = self.library[name]
        if isinstance(given, _StoredRows):
            return self.settings.prepared(given.read())
        if isinstance(given, str | os.PathLike):
            text = os.fspath(given)
            named = text in SOURCES or not Path(text).suffix
            given = load(text) if named else load("arrays", path=text)
        given = samples_of(f"library[{name!r}]", given)
        with placed(f"library[{name!r}]"):
            return self.settings.prepared(replace(as_samples(given, name), name=name))


class _StoredRows(NamedTuple):
    """The rows of a member in the folder of an index."""

    where: Path | None
    key: str
    name: str

    def read(self) -> LabeledSamples:
        """Read them.

        Raises:
            InputError: the file is missing or damaged.
        """
        found = _read_rows(self.where, self.key, self.name)
        if found is None:
            raise InputError(
                f"the rows of {self.name} in {self.where} are missing or damaged; give that "
                "dataset to otdd.index again"
            )
        return found


def _build(
    reader: _Reader,
    where: Path | None,
    seen: Mapping[str, Any] | None,
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> Index:
    """Compute the entries that are not stored, chunk by chunk, each written when it is solved.

    Raises:
        InputError: index.json is no longer as it was read, `seen`.
    """
    entries, held = dict[str, Entry](), dict[str, LabeledSamples]()
    stored = {n: one.key for n, one in reader.library.items() if isinstance(one, _StoredRows)}
    members, mark = dict(stored), reader.settings.mark
    for name, key in stored.items():
        if key not in entries and (found := _restored(where, key, name, mark)) is not None:
            entries[key] = found
    names = [name for name in reader.library if stored.get(name) not in entries]
    source = reader.read(names)
    with _building(where if names else None):
        if where is not None and names and _read_index(where) != seen:
            raise InputError(f"another process has changed the index in {where}; try again")
        while chunk := list(islice(source, TOGETHER)):
            new: dict[str, LabeledSamples] = {}
            for name, samples in chunk:
                key = members[name] = digest_of(samples)
                if where is None:
                    held.setdefault(key, samples)
                known = _restored(where, key, name, mark) if key not in entries else None
                if known is not None and _read_rows(where, key, name) is not None:
                    entries[key] = known
                elif key not in entries:
                    new.setdefault(key, samples)
            if where is not None:
                # The index goes first: entries that are not whole are computed again.
                _write_index(where, reader.settings, members)
            solved = _solved(reader, new, cache_dir)
            if len(solved) < len(new):
                without = new.keys() - {entry.digest for entry in solved}
                members = {n: key for n, key in members.items() if key not in without}
                if where is not None:
                    _write_index(where, reader.settings, members)
            for entry in solved:
                entries[entry.digest] = entry
                if where is not None:
                    _write_entry(where, entry, new[entry.digest], mark)
            if progress is not None:
                progress(sum(key in entries for key in members.values()), len(reader.library))
    if not entries:
        raise InputError(NO_MEMBER)
    first: dict[str, str] = {}
    whole = {n: members[n] for n in reader.library if members.get(n) in entries}
    twice = {name: first[key] for name, key in whole.items() if first.setdefault(key, name) != name}
    if twice:
        pairs = listing([f"{one} is {other}" for one, other in twice.items()], 8)
        warn(f"members of equal content are ranked once: {pairs}", DataNotice)
    kept = tuple(replace(entries[key], name=name) for key, name in first.items())
    lost = tuple(name for name in stored if members.get(name) not in entries)
    return Index(reader.settings, kept, reader.compute, where, held, twice, lost)


def _solved(
    reader: _Reader,
    new: Mapping[str, LabeledSamples],
    cache_dir: str | os.PathLike[str] | None,
) -> list[Entry]:
    """Solve the self terms of new members; those that have none are refused or left out."""
    if not new:
        return []
    try:
        return _solved_together(reader, new, cache_dir)
    except InputError as error:
        if len(new) > 1:
            alone = ({key: samples} for key, samples in new.items())
            return [entry for one in alone for entry in _solved(reader, one, cache_dir)]
        (samples,) = new.values()
        said = f"{samples.name} has no self term in the index: {error}"
        if not reader.skip:
            raise InputError(said) from error
        warn(f"{said}: it is left out of the index", DataNotice)
        return []


def _solved_together(
    reader: _Reader,
    new: Mapping[str, LabeledSamples],
    cache_dir: str | os.PathLike[str] | None,
) -> list[Entry]:
    """Measure classes and solve the self terms of new members, dealt to ranks if there are any."""
    settings, metric = reader.settings, reader.settings.metric
    sides = [settings.transformed(one, reader.compute) for one in new.values()]
    tables = class_tables(sides, [(k, k) for k in range(len(sides))], metric, cache_dir)
    problems = [Problem(side, side, table) for side, table in zip(sides, tables, strict=True)]
    solver = settings.terms(reader.compute)
    terms = spread(reader.compute.group, self_terms, solver, problems)
    moments = moments_of(sides, metric, settings.cost, tables)
    parts = zip(sides, new, terms, moments, strict=True)
    return [Entry(side.name, key, term, known) for side, key, term, known in parts]


@contextmanager
def _building(where: Path | None) -> Iterator[None]:
    """Keep other processes from building in a folder, and remove what a killed one has left.

    Raises:
        InputError: another process builds there, or nothing can be written.
    """
    if where is None:
        yield
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        held = lock(where / LOCK_FILE)
    except OSError as error:
        raise cannot_write(where, error) from error
    if held is None:
        raise InputError(f"another process is building the index in {where}; wait until it ends")
    try:
        for left in where.glob(".*.partial"):
            left.unlink(missing_ok=True)
        yield
    finally:
        unlock(where / LOCK_FILE, held)


def _write_index(where: Path, built: Settings, members: Mapping[str, str]) -> None:
    content = {
        "index": INDEX_FORMAT,
        "settings": built.to_dict(),
        "members": dict(members),
        "versions": versions(),
    }
    texts = {"index": json.dumps(content, sort_keys=True)}
    write_json(where / INDEX_FILE, {**content, CHECKSUM: checksum({}, texts)})


def _read_index(where: Path) -> dict[str, Any] | None:
    """Return the content of index.json, or None if there is none.

    Raises:
        InputError: it is damaged, or of a later version.
    """
    path = where / INDEX_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        mark = content.pop(CHECKSUM)
        if mark != checksum({}, {"index": json.dumps(content, sort_keys=True)}):
            raise DamagedFileError("its checksum does not match")
        check_format(path, {**content["versions"], "format": content["index"]}, INDEX_FORMAT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, DamagedFileError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is damaged ({error}); remove it, and build the index again: what is whole of "
            "its members is not computed again at the same settings"
        ) from error
    return content


def _write_entry(where: Path, entry: Entry, samples: LabeledSamples, mark: str) -> None:
    parts = {name: getattr(samples, name) for name in (*TENSORS, "members")}
    rows = {name: part for name, part in parts.items() if part is not None}
    names = json.dumps(samples.label_names)
    write_tensors(where / f"{entry.digest}.rows.safetensors", rows, {"class_names": names})
    texts = {"term": json.dumps(entry.term._asdict()), "settings": mark}
    write_tensors(where / f"{entry.digest}.safetensors", entry.moments._asdict(), texts)


def _restored(where: Path | None, key: str, name: str, mark: str) -> Entry | None:
    """Return a stored entry, or None if it is missing, damaged or of other settings."""
    if where is None:
        return None
    path = where / f"{key}.safetensors"
    try:
        stored = read_tensors(path)
        if stored.texts["settings"] != mark:
            return None
        term = SelfTerm(**json.loads(stored.texts["term"]))
        term = term._replace(bounds=(term.bounds[0], term.bounds[1]))
        return Entry(name, key, term, Moments(**stored.tensors))
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError, LookupError, ValueError, TypeError) as error:
        warn(f"the entry of {name} in {where} is damaged ({error}): solving it again", DataNotice)
        return None


def _read_rows(where: Path | None, key: str, name: str) -> LabeledSamples | None:
    """Return the stored rows of a member, or None if they are missing or damaged."""
    if where is None:
        return None
    try:
        stored = read_tensors(where / f"{key}.rows.safetensors")
        parts: dict[str, Any] = dict(stored.tensors)
        names = json.loads(stored.texts["class_names"])
        sets = named_sets(parts.pop("members", None), names)
        found = LabeledSamples(**{"labels": None, **parts}, **sets, name=name)
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError, LookupError, ValueError) as error:
        warn(f"the rows of {name} in {where} are damaged ({error})", DataNotice)
        return None
    return found if digest_of(found) == key else None
