"""The race for the first places: which members of an index are nearest to a query, proven.

    S(query, member) = OT(query, member) - OT(query, query) / 2 - OT(member, member) / 2

Every member has an interval of its value, at first from moments; with relaxed marginals, for which
moments prove nothing, an infinite one. The member of the least lower bound among those whose place
is open gets the next budget (`bounds.Terms`). If members are solved one at a time, as in A*, none
is solved whose lower bound is above the k-th value. On a GPU or several ranks some get the budget
together, a few of them in vain. A member is among the first k if at most k - 1 others may be nearer
by more than `tie`, and out if k others are no farther than the sum of its lower bound and `tie`. So
equal values, which no effort separates, end the race as well.

`nearest` is the public function, which `commands.nearest` and users call, and `Ranking` what it
returns. `commands.nearest` writes `to_dict` as ranking.json, `commands.results` logs it, and
`report.nearest` writes and draws the rows. Users read both, so the fields of `Ranking`, `Ranked`
and `Cost` must keep their names. A place may be called proven only by intervals: an estimate of a
value must never decide one (`tests/ranking/test_race.py`).
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import numpy as np

from otdd_flash.arguments import Count, NotNegative, Positive, Progress, Seed, takes
from otdd_flash.cost.compute import Compute
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.atomic import json_content
from otdd_flash.ranking.bounds import (
    AT_ONCE,
    Problem,
    SelfTerm,
    Terms,
    class_tables,
    cross_terms,
    lowest_by_moments,
    moments_of,
    self_terms,
    spread,
)
from otdd_flash.ranking.index import Entry, Index, digest_of, index
from otdd_flash.raw_labels import frame_of
from otdd_flash.result import versions
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.subsampling import LEVEL, check_count, subsample_interval
from otdd_flash.shown import display, interval, listing
from otdd_flash.solver.term import TransportTerm

# Members whose class distances are measured together on a GPU, and the entries of their features.
MOST_AT_ONCE, MOST_ENTRIES = 128, 1 << 26
# A tie that is more of the mean cost is told.
MOST_TIE = 0.01

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from pandas import DataFrame
    from torch import Tensor


class Ranked(NamedTuple):
    """A member of a ranking.

    Attributes:
        name: in the library.
        value: S_epsilon, in units of the cost: of the first k to the default tolerance unless time
            was over, of others as far as their budgets went; NaN where only bounds are known.
        lower: its lower bound, by moments where nothing was solved.
        upper: its upper solver bound, infinite where nothing was solved.
        proven: whether it is one of the first k, or with `ordered` at this very place, whatever the
            values are within their bounds, up to `tie`.
        tied: names of members whose values are proven to differ from it by at most `tie`, or that
            rounding at this precision does not tell from it.
    """

    name: str
    value: float
    lower: float
    upper: float
    proven: bool
    tied: tuple[str, ...]


class Cost(NamedTuple):
    """The work and time of a ranking.

    Attributes:
        members: in the race.
        touched: of which a cross term was solved, at least within the first budget.
        finished: of which it was solved to the end.
        passes: evaluations of cross terms' costs, in units of n m.
        full_passes: of all cross terms, by the mean of those that were solved to the end.
        seconds: of wall time.
    """

    members: int
    touched: int
    finished: int
    passes: float
    full_passes: float
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class Ranking:
    """The nearest members of an index to a query.

    Attributes:
        query: its name.
        rows: the first k, the nearest first.
        others: all other members, by their lower bounds.
        certified: whether all k places are proven, and no unreadable member could be nearer.
        stopped_by: `proven`; `max_seconds`; `damage`, members that may be nearer cannot be read; or
            `rounding`, which keeps intervals from narrowing.
        cost: the work that it took.
        details: epsilon, tie, settings of the index, the names of members that cannot be read as
            `unread`, and sampling intervals of the rows if asked for.
    """

    query: str
    rows: tuple[Ranked, ...]
    others: tuple[Ranked, ...]
    certified: bool
    stopped_by: str
    cost: Cost
    details: Mapping[str, Any] = field(kw_only=True)

    def __repr__(self) -> str:
        proven = sum(row.proven for row in self.rows)
        return (
            f"Ranking({display(self.query)}: {listing([row.name for row in self.rows], 8)}; "
            f"{proven} of {len(self.rows)} proven)"
        )

    def __str__(self) -> str:
        """Return a line for each place and sentences on what is open."""
        lines = [
            f"{place}. {display(row.name)} {interval(row.value, row.lower, row.upper)}"
            f"{'' if row.proven else ' not proven'}"
            for place, row in enumerate(self.rows, 1)
        ]
        return "\n".join([*lines, *self.sentences()])

    def sentences(self) -> tuple[str, ...]:
        """Say in words what is proven, tied and spent, and what sampling leaves open."""
        cost, count = self.cost, self.details["k"]
        # Unknown where nothing was solved to the end.
        known = cost.full_passes > 0
        share = f", {cost.passes / cost.full_passes:.1%} of the passes of solving all"
        said = [
            f"all {count} places are proven"
            if self.certified
            else f"{sum(row.proven for row in self.rows)} of {count} places are proven, the solve "
            f"stopped by {self.stopped_by}",
            f"{cost.touched} of {cost.members} cross terms were begun and {cost.finished} solved "
            f"to the end{share if known else ''}",
        ]
        ties = [
            f"{display(row.name)} is as near as {listing(row.tied, 4)}, up to "
            f"{self.details['tie']:g} or to rounding"
            for row in self.rows
            if row.tied
        ]
        if self.stopped_by == "rounding":
            ties.append("an index of precision=double tells more of them apart, or a larger tie")
        if unread := self.details["unread"]:
            ties.append(
                f"members that cannot be read take no place: {listing(unread, 8)}; give them to "
                "otdd.index again"
            )
        return (*said, *ties, *_of_sampling(self.details.get("sampling", ())))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ranking.json, in JSON's own types; infinite numbers are None."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        del named["details"]
        content = {
            **named,
            "rows": [row._asdict() for row in self.rows],
            "others": [row._asdict() for row in self.others],
            "cost": self.cost._asdict(),
            "sentences": self.sentences(),
            **self.details,
        }
        return json_content(content)

    def to_frame(self) -> DataFrame:
        """Return a pandas table of all members, the first k first; columns are those of `rows`."""
        return frame_of([*self.rows, *self.others], get_type_hints(Ranked) | {"tied": object})

    def plot(self) -> Figure:
        """Draw the intervals of the first members as bars, the report's ranking.png."""
        from otdd_flash.report.nearest import plot_ranking

        return plot_ranking(self)


def _of_sampling(intervals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what the sampling intervals are, and which neighbouring places they do not separate."""
    said = [f"{display(one['name'])} [{one['lower']:.4g}, {one['upper']:.4g}]" for one in intervals]
    apart = [
        f"places {place} and {place + 1} differ by less than their sampling error"
        for place, (one, other) in enumerate(pairwise(intervals), 1)
        if one["upper"] >= other["lower"]
    ]
    return [f"sampling intervals: {', '.join(said)}", *apart] if said else []


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes out.
@computes
@takes()
def nearest(
    query: Samples,
    library: Any,
    k: Count = 5,
    *,
    epsilon: NotNegative | None = None,
    rebuild: bool = False,
    skip: bool = False,
    ordered: bool = False,
    tie: NotNegative = 1e-4,
    max_seconds: Positive | None = None,
    subsample: Count | None = None,
    seed: Seed = 0,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Find the k datasets of an index that are nearest to a query, and prove it.

    Values are those of `dataset_distance` at the index's settings, with solver bounds. A member
    with the query's rows comes first, at distance 0.

    Args:
        query: samples of the members' dimension, as `dataset_distance` takes them.
        library: an index of `otdd.index`, the folder of one, or datasets by name, from which an
            index is built in memory.
        k: how many members to find.
        epsilon: refused if the index has another one, unless `rebuild`.
        rebuild: with another epsilon, solve the self terms of all members again, in memory.
        skip: with datasets by name: leave out, with a notice, those that cannot be compared with
            the query, such as those of another dimension. False raises.
        ordered: prove the order of the first k as well.
        tie: values that differ by at most this, in units of the cost, count as equal.
        max_seconds: wall time after which it stops, with what is proven then; iterations under way
            are finished first.
        subsample: K, the number of subsamples for a sampling interval of each of the first k; None:
            none.
        seed: seed of the subsamples.
        compute: `otdd.ComputeOptions`, or only a device; by default as for the index.
        cache_dir: folder of a database of measured class distances.
        progress: called as progress(members whose place is settled, all members).

    Raises:
        InputError: the request cannot be met; the message says what to change.

    Warns:
        DataNotice: the library has fewer than k members; `tie` is large compared with the costs; or
            the rows of a member cannot be read. Such a member takes no place; if it may be nearer,
            the ranking is not certified.
    """
    started = time.perf_counter()
    if subsample is not None:
        check_count(subsample, LEVEL)
    samples = as_samples(query, "query")
    if isinstance(library, Mapping):
        built = partial(index, library, compute=compute, cache_dir=cache_dir)
        known = built(epsilon=epsilon, dim=samples.dim, skip=skip)
    else:
        known = _known(library, epsilon, rebuild, compute, cache_dir)
    if k > len(known):
        warn(f"k={k} is above the {len(known)} members of the index: all are ranked", DataNotice)
        k = len(known)
    if tie > MOST_TIE * known.settings.mean_cost > 0:
        warn(
            f"tie={tie:g} is large beside the mean cost {known.settings.mean_cost:.3g} between "
            "rows of members: differences of most values may be below it; lower tie",
            DataNotice,
        )
    asked = known.settings.prepared(samples)
    if asked.dim != known.dim:
        raise InputError(
            f"the query has {asked.dim} features, and the members of the index have {known.dim}; "
            "embed all by the same extractor"
        )
    race = _Race(known, asked, k, tie, ordered, cache_dir)
    stopped_by = race.run(started, max_seconds, progress)
    rows, others = race.ranked()
    details: dict[str, Any] = {
        "epsilon": known.settings.epsilon,
        "k": k,
        "ordered": ordered,
        "tie": tie,
        "settings": known.settings.to_dict(),
        "duplicates": dict(known.duplicates),
        "unread": race.unread,
        "device": str(resolve_device(known.compute.device)),
        "versions": versions(),
    }
    if subsample is not None:
        details["sampling"] = race.sampling(rows, subsample, seed)
    certified = not race.unread and all(row.proven for row in rows)
    cost = race.cost(time.perf_counter() - started)
    return Ranking(race.query.name, rows, others, certified, stopped_by, cost, details=details)


def _known(
    library: Any,
    epsilon: float | None,
    rebuild: bool,
    compute: Compute | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Index:
    """Return an index or that of a folder, on the device and at the epsilon that are asked for."""
    if isinstance(library, str | os.PathLike):
        library = Index.load(Path(library), compute)
    if not isinstance(library, Index):
        raise InputError(
            "library must be an index of otdd.index, its folder, or datasets by name, got "
            f"{type(library).__name__}"
        )
    own, settings = library.settings.epsilon, library.settings
    chosen = library.compute if compute is None else settings.on(compute)
    if epsilon is None or epsilon == own:
        return replace(library, compute=chosen)
    if not rebuild:
        raise InputError(
            f"the index was built with epsilon={own:g}, not {epsilon:g}, and values at different "
            "epsilons do not compare; leave epsilon out, or set rebuild=true to solve the self "
            "terms of all members again"
        )
    given = {**settings.arguments, "epsilon": epsilon}
    rebuilt = index(library.members, compute=chosen, cache_dir=cache_dir, **given)
    return replace(rebuilt, lost=(*library.lost, *rebuilt.lost))


@dataclass(eq=False)
class _Candidate:
    """A member in the race, with the interval that is proven so far."""

    entry: Entry
    lower: float
    upper: float = math.inf
    value: float = math.nan
    term: TransportTerm | None = None
    table: Tensor | None = None
    level: int = 0
    last: bool = False
    unread: bool = False

    @property
    def solved(self) -> bool:
        """Whether its cross term was solved to the end."""
        return self.last or (self.term is not None and self.term.converged)

    @property
    def guess(self) -> float:
        """The value, or where nothing was solved its lower bound."""
        return self.lower if math.isnan(self.value) else self.value

    def row(self, proven: bool, tied: Sequence[str]) -> Ranked:
        return Ranked(self.entry.name, self.value, self.lower, self.upper, proven, tuple(tied))


class _Race:
    """The candidates of one query, and what has been proven of them.

    Args:
        known: the index.
        query: as members are.
        k: how many places.
        tie: values that differ by no more are equal.
        ordered: whether the order of the places is wanted.
        cache_dir: of class distances.
    """

    def __init__(
        self,
        known: Index,
        query: LabeledSamples,
        k: int,
        tie: float,
        ordered: bool,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.known, self.query, self.tie, self.ordered = known, query, tie, ordered
        self._cache_dir = cache_dir
        self._terms: Terms = known.settings.terms(known.compute)
        self._x = known.settings.transformed(query, known.compute)
        digest = digest_of(query)
        self._same = [one for one in known.entries if one.digest == digest]
        # The query itself is nearest, without a race.
        self.k = k - len(self._same)
        settings = known.settings
        (self._table,) = class_tables([self._x], [(0, 0)], settings.metric, cache_dir)
        self._own = self._self_term()
        self.candidates = self._begun()

    def _self_term(self) -> SelfTerm:
        """Solve the query's self term; a member of its rows has it already."""
        for entry in self._same:
            return entry.term
        (term,) = self_terms(self._terms, [Problem(self._x, self._x, self._table)])
        return term

    def _begun(self) -> list[_Candidate]:
        """Return the candidates in the order of what moments prove."""
        settings, device = self.known.settings, self._x.features.device
        entries = [one for one in self.known.entries if one not in self._same]
        if not entries:
            return []
        cost, metric = settings.cost, settings.metric
        (moments,) = moments_of([self._x], metric, cost, [self._table])
        members = [one.moments for one in entries]
        found = lowest_by_moments(moments, members, cost, metric, device)
        candidates = [
            _Candidate(one, lower - (self._own.bounds[1] + one.term.bounds[1]) / 2)
            for one, lower in zip(entries, found.tolist(), strict=True)
        ]
        candidates.sort(key=lambda one: one.lower)
        if settings.unbalanced is not None:
            # Mass that is not matched may cost less: the order is a guess, and nothing is proven.
            for one in candidates:
                one.lower = -math.inf
        return candidates

    def run(self, started: float, seconds: float | None, progress: Progress | None) -> str:
        """Spend budgets until the places are proven; return what ended the race.

        At last those of the first k that were not solved to the end are, for their values.
        """
        total = len(self.candidates)
        while True:
            placed, proven, out = self._placed()
            all_proven = not self.unread and bool(proven[: self.k].all())
            settled = proven | out | all_proven
            opened = [one for one, known in zip(placed, settled, strict=True) if not known]
            # Intervals no wider than half a tie are narrow enough.
            able = [one for one in opened if not one.last and one.upper - one.lower > self.tie / 2]
            unsolved = [one for one in placed[: self.k] if not one.solved]
            chosen = self._chosen(able or unsolved)
            if progress is not None:
                progress(total - len(opened), total)
            if not chosen:
                return "proven" if all_proven else "damage" if self.unread else "rounding"
            if seconds is not None and time.perf_counter() - started >= seconds:
                return "proven" if all_proven else "max_seconds"
            self._raise(chosen)

    def _placed(self) -> tuple[list[_Candidate], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the candidates by their upper bounds, which are proven, and which are out.

        Proven is a candidate among the first k, or with `ordered` at its place. Out is one of which
        k others are no farther, up to a tie. A candidate that cannot be read is last and has no
        place; a member that the index has lost may be anywhere.
        """
        placed = sorted(self.candidates, key=lambda one: (one.unread, one.upper, one.lower))
        lost = len(self.known.lost)
        lower, upper = np.array([(one.lower, one.upper) for one in placed]).reshape(-1, 2).T
        reach = upper - self.tie
        if self.ordered:
            before = np.maximum.accumulate([-math.inf, *upper])[:-1]
            least = -math.inf if lost else math.inf
            after = np.minimum.accumulate([least, *lower[::-1]])[:-1][::-1]
            proven = (before - self.tie <= lower) & (reach <= after)
        else:
            # Others that may be nearer by more than a tie are fewer than k.
            proven = np.searchsorted(np.sort(lower), reach) - (lower < reach) < self.k - lost
        kth, following = [-math.inf, *upper, math.inf][self.k : self.k + 2]
        out = np.where(upper <= kth, following, kth) <= lower + self.tie
        return placed, proven, out

    def _chosen(self, able: list[_Candidate]) -> list[_Candidate]:
        """Return the candidates of least lower bounds that get the next budget together."""
        able.sort(key=lambda one: one.lower)
        ranks, count = getattr(self.known.compute.group, "size", 1), 1
        if able and able[0].term is None:
            rows = self._rows(able[0])
            if rows is not None and self._terms.takes_many(self._x, rows):
                able = [one for one in able if one.term is None]
                # As many as before: few are solved in vain, and many are measured together.
                begun = sum(one.term is not None for one in self.candidates)
                most = min(MOST_AT_ONCE, MOST_ENTRIES // max(1, rows.features.numel()))
                count = max(AT_ONCE, min(begun, most))
        return able[: count * ranks]

    def _rows(self, one: _Candidate) -> LabeledSamples | None:
        """Return a candidate's rows, or None if they cannot be read: all that is known is known."""
        if one.unread:
            return None
        try:
            rows = self.known.rows(one.entry)
        except InputError as error:
            warn(f"{error}: it takes no place in this ranking", DataNotice)
            one.unread = one.last = True
            return None
        return self.known.settings.transformed(rows, self.known.compute)

    @property
    def unread(self) -> list[str]:
        """The names of members that cannot be read, as far as the race has met them."""
        met = (one.entry.name for one in self.candidates if one.unread)
        return [*self.known.lost, *met]

    def _problems(
        self, chosen: Sequence[_Candidate], rows: Sequence[LabeledSamples]
    ) -> list[Problem]:
        """Return the cross terms of candidates, whose class distances are measured now."""
        settings = self.known.settings
        new = [place for place, one in enumerate(chosen) if one.table is None]
        if new:
            sides, pairs = [self._x, *rows], [(0, place + 1) for place in new]
            tables = class_tables(sides, pairs, settings.metric, self._cache_dir)
            for place, measured in zip(new, tables, strict=True):
                chosen[place].table = measured
        return [
            Problem(self._x, side, table, one.term, one.level)
            for one, side in zip(chosen, rows, strict=True)
            if (table := one.table) is not None
        ]

    def _raise(self, chosen: Sequence[_Candidate]) -> None:
        """Solve the cross terms of candidates within their next budgets."""
        read = [(one, rows) for one in chosen if (rows := self._rows(one)) is not None]
        if not read:
            return
        chosen, sides = zip(*read, strict=True)
        problems = self._problems(chosen, sides)
        found = spread(self.known.compute.group, cross_terms, self._terms, problems)
        for one, (term, last) in zip(chosen, found, strict=True):
            one.term, one.level, one.last = term, one.level + 1, last
            if term is None:
                continue
            others = self._own, one.entry.term
            # Each end takes the opposite ends of the self terms.
            one.lower = max(one.lower, term.bounds[0] - sum(two.bounds[1] for two in others) / 2)
            one.upper = min(one.upper, term.bounds[1] - sum(two.bounds[0] for two in others) / 2)
            value = term.value - sum(two.value for two in others) / 2
            # An interval that was proven earlier may end below a value found later.
            one.value = min(max(value, one.lower), one.upper)

    def ranked(self) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
        """Return the first k and all others as rows."""
        placed, proven, _ = self._placed()
        known = dict(zip(placed, proven.tolist(), strict=True))
        rest, ties = placed, self._ties()
        if not self.ordered:
            # Proven candidates come first among the k, however wide their intervals are.
            rest = sorted(placed, key=lambda one: (one.unread, not known[one], one.guess))
        most = min(self.k, sum(not one.unread for one in rest))
        first, rest = rest[:most], rest[most:]
        if not self.ordered:
            first.sort(key=lambda one: one.guess)
        rows = [Ranked(one.name, 0.0, 0.0, 0.0, True, ()) for one in self._same]
        rows += [one.row(known[one], ties[one]) for one in first]
        rest.sort(key=lambda one: one.lower)
        return tuple(rows), tuple(one.row(False, ties[one]) for one in rest)

    def _ties(self) -> dict[_Candidate, list[str]]:
        """Return for candidates the names of those whose values nothing tells from theirs."""
        # Wider intervals are of values that further solves may tell apart.
        read = [one for one in self.candidates if not one.unread]
        narrow = [one for one in read if one.last or one.upper - one.lower <= self.tie]
        narrow.sort(key=lambda one: one.lower)
        found = defaultdict[_Candidate, list[str]](list)
        for place, one in enumerate(narrow, 1):
            reach = max(one.upper, one.lower + self.tie)
            end = bisect_right(narrow, reach, place, key=lambda other: other.lower)
            for other in narrow[place:end]:
                equal = max(one.upper, other.upper) - one.lower <= self.tie
                overlap = other.lower < min(one.upper, other.upper)
                if equal or (one.last and other.last and overlap):
                    found[one].append(other.entry.name)
                    found[other].append(one.entry.name)
        return found

    def cost(self, seconds: float) -> Cost:
        """Return what the race took."""
        terms = [one.term for one in self.candidates if one.term is not None]
        solved = (one for one in self.candidates if one.solved)
        ended = [one.term.passes for one in solved if one.term is not None]
        passes, members = float(sum(term.passes for term in terms)), len(self.candidates)
        full = sum(ended) / len(ended) * members if ended else math.nan
        return Cost(members, len(terms), len(ended), passes, full, seconds)

    def sampling(self, first: Sequence[Ranked], count: int, seed: int) -> list[dict[str, Any]]:
        """Estimate the sampling intervals of the rows, by subsamples of query and member."""
        entries = {entry.name: entry for entry in self.known.entries}
        same = [entry.name for entry in self._same]
        found = []
        for row in first:
            value = row.lower if math.isnan(row.value) else row.value
            rows = self.query if row.name in same else self.known.rows(entries[row.name])
            drawn: dict[str, Any] = {"count": count, "seed": seed, **self.known.settings.arguments}
            drawn["compute"] = self.known.compute
            interval = subsample_interval(self.query, rows, value, **drawn)
            found.append({"name": row.name, "lower": interval.lower, "upper": interval.upper})
        return found
