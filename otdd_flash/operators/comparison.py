"""Datasets to be compared: checked, moved to the device and transformed for the ground cost, once.

Entry points for datasets call `check_comparable` for the datasets as they were given, then
`Comparison.prepare`; `solver.solving` and `solver.tensors`, which are given an epsilon, call
`Comparison.between`, which does both. Class distances, operators, solves and results read the
points from a `Comparison`. Its points are transformed for the ground cost (`cost.ground`) when it
is made: operators and solvers know squared distances between transformed points only, and must not
transform them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations

import torch
from torch import Tensor

from otdd_flash.cost.class_table import ClassTable
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.facts import SIDES, TERMS, Pair
from otdd_flash.cost.ground import NO_OFFSET, GroundCost, Offset
from otdd_flash.cost.host_points import Streaming
from otdd_flash.cost.points import DOUBLE_UNIT, LabelledCost, Points, forget_cloud, points_of
from otdd_flash.devices import check_one_device, resolve_device
from otdd_flash.distributed.ranks import Ranks, ranks_of
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.fingerprint import Mark, mark_of, mark_of_tensors
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.memory import (
    ASSUMED_FREE,
    check_memory,
    free_memory,
    stated_budget,
    within_memory,
)
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import CostSize, build_operator, operator_bytes
from otdd_flash.operators.label_costs import (
    MOST_SETS,
    LabelEmbedding,
    by_labels,
    embedding_of_sets,
    embedding_of_targets,
    has_sets,
    no_embedding,
    set_table,
    set_table_error,
)
from otdd_flash.samples import (
    LabeledSamples,
    check_same_dimension,
    check_squares,
    largest_entry,
    same_content,
)

# Shares of free memory: of the device for streamed points, and of the host for their packed form.
STREAMED_SHARE, HELD_SHARE = 0.6, 0.5

# Least epsilon over the largest cost that float64 can solve.
WITHIN_DOUBLE = 1e-12

DOUBLE_BYTES = 8

# The largest effect on the marginals that the rounding of costs in float64 may have: as large as
# the default tolerance.
MOST_GROWTH = 1e-3


@dataclass(frozen=True, eq=False)
class Comparison:
    """K datasets on the device, with the cost between them; two of them have a divergence.

    `prepare` makes one. `with_classes` and `at` return a comparison of two datasets with class
    distances and epsilon, once these are known; both are 0 until then.

    Attributes:
        given: the datasets, moved to the device.
        transformed: the datasets with transformed points, see `cost.ground`.
        ground: the ground cost and its weights.
        compute: options of the passes.
        needed: least bytes of the largest operator and of the datasets that were moved.
        classes: the class distances between the first and the last dataset.
        streaming: for points that stay on the host and are streamed, as labels and weights then do;
            None if all are on the device.
        debias: whether the divergence has self terms, or is the cross term alone.
        epsilon: regularisation, in units of the cost.
        embedding: the label cost, where `transformed` points have it as columns; else None.
        label_error: bound on the error of the label cost by its sums over labels.
        constraints: exact or relaxed marginals of plans.
        target_scale: divisors of the q numbers of a row, whose squared distance stands in place of
            W; None: rows have classes.
    """

    given: tuple[LabeledSamples, ...]
    transformed: tuple[LabeledSamples, ...]
    ground: GroundCost
    compute: ComputeOptions
    needed: int
    classes: ClassTable
    streaming: Streaming | None = None
    debias: bool = True
    epsilon: float = 0.0
    embedding: LabelEmbedding | None = None
    label_error: float = 0.0
    constraints: Constraints = EXACT
    target_scale: tuple[float, ...] | None = None

    @classmethod
    def prepare(
        cls,
        datasets: Sequence[LabeledSamples],
        ground: GroundCost,
        compute: ComputeOptions,
        *,
        debias: bool = True,
        pairs: Iterable[Pair] | None = None,
        transformed: bool = False,
        resident: bool = False,
        target_scale: tuple[float, ...] | None = None,
    ) -> Comparison:
        """Check device and memory, then move and transform the datasets.

        Args:
            datasets: checked by `check_comparable`; one object may occur several times.
            ground: the ground cost and its weights.
            compute: options of the passes.
            debias: False if no dataset is compared with itself.
            pairs: indices of the datasets between which operators will be built; by default every
                two and, if `debias`, each with itself.
            transformed: whether points are transformed for the ground cost already.
            resident: whether all points are needed on the device. Otherwise those that do not fit
                stay where they are and are streamed.
            target_scale: of numbers, see `labels.metrics.scale_of`.

        Raises:
            InputError: there is no such device, the backend cannot run on it or in the precision,
                memory is short, or the ground cost is not defined for a point.
        """
        device = resolve_device(compute.device)
        _check_group(compute, device)
        if pairs is None:
            places = range(len(datasets))
            own = zip(places, places, strict=True) if debias else ()
            pairs = (*combinations(places, 2), *own)
        pairs = list(pairs)
        streaming = None if resident else _streaming(datasets, pairs, compute, device)
        if streaming is not None:
            _check_streamed(datasets, ground, compute, transformed=transformed)
            given = points = tuple(datasets)
            needed = streaming.room
        else:
            needed = check_resources(datasets, pairs, compute, device)
            size = cost_size(datasets[0], datasets[-1])
            with within_memory(size, needed, device, compute.dtype):
                given, points = _moved(datasets, ground, device, transformed=transformed)
        classes = _class_table(None, points, device)
        return cls(
            given,
            points,
            ground,
            compute,
            needed,
            classes,
            streaming,
            debias,
            target_scale=target_scale,
        )

    @classmethod
    def between(
        cls,
        source: LabeledSamples | Tensor,
        target: LabeledSamples | Tensor,
        epsilon: float,
        class_table: Tensor | None = None,
        ground: GroundCost | None = None,
        compute: ComputeOptions | None = None,
        *,
        debias: bool = True,
        resident: bool = False,
    ) -> Comparison:
        """Prepare the comparison of two clouds at an epsilon; samples have labels and weights.

        Raises:
            InputError: as `check_comparable`, `prepare`, `with_classes` and `at`.
        """
        sides = _as_samples(source), _as_samples(target)
        check_comparable(*sides)
        ground, compute = ground or GroundCost(), compute or ComputeOptions()
        prepared = cls.prepare(sides, ground, compute, debias=debias, resident=resident)
        return prepared.at(epsilon).with_classes(class_table)

    def of(self, *places: int) -> Comparison:
        """Return the comparison of some of the datasets, without class distances.

        If all were streamed, these are moved to the device where they fit.
        """
        if self.streaming is None:
            given, transformed = (
                tuple(each[k] for k in places) for each in (self.given, self.transformed)
            )
            classes = _class_table(None, transformed, self.device)
            return replace(self, given=given, transformed=transformed, classes=classes)
        some = [self.given[place] for place in places]
        ends = ((0, len(some) - 1),)
        found = Comparison.prepare(some, self.ground, self.compute, pairs=ends)
        streaming = found.streaming
        if streaming is not None:
            streaming = replace(streaming, tally=self.streaming.tally)
        return replace(
            found,
            streaming=streaming,
            debias=self.debias,
            epsilon=self.epsilon,
            constraints=self.constraints,
            target_scale=self.target_scale,
        )

    def with_classes(self, table: Tensor | None) -> Comparison:
        """Return the comparison at class distances W (V_x + V_y, V_x + V_y), on any device.

        W is over labels. Rows with several become rows of the class of their set, or get columns
        that hold the label cost, as numbers do; see `operators.label_costs`.

        Raises:
            InputError: the table has another size or is not finite.
        """
        assert self.embedding is None, "the points have columns of labels already"
        sides = self.transformed[0], self.transformed[-1]
        if self.target_scale is not None:
            found = embedding_of_targets(sides, self.ground, self.target_scale)
            return self._with_embedding(found)
        if table is None or not has_sets(sides):
            return replace(self, classes=_class_table(table, sides, self.device))
        if any(side.labels is None for side in sides):
            # Of labels that are not compared, as the other side has none.
            return replace(self, classes=_class_table(None, sides, self.device))
        names = tuple(len(side.label_names) for side in sides)
        given = ClassTable(table, (names[0], names[1]), torch.device("cpu")).full
        if max(side.class_total for side in sides) <= MOST_SETS:
            wide = _class_table(set_table(given, sides), sides, self.device)
            return replace(self, classes=wide, label_error=set_table_error(given, self.ground))
        if self.ground.lambda_y == 0 or not bool(given.any()):
            return self._with_embedding(no_embedding(sides, self.ground))
        return self._with_embedding(embedding_of_sets(given, sides, self.ground))

    def _with_embedding(self, embedding: LabelEmbedding) -> Comparison:
        """Return the comparison of points with columns, as one class.

        Raises:
            InputError: points are streamed, or are compared by no squared distances, or they do not
                fit in memory with their columns.
        """
        apart = self.streaming is not None or self.ground.ground == "inner"
        if apart and not embedding.empty:
            raise InputError(
                "numbers, and many sets of labels, are compared as columns of points in memory by "
                "squared distances; raise memory_budget where these are streamed, and take "
                "ground=sqeuclidean or cosine in place of inner"
            )
        sides = self.transformed[0], self.transformed[-1]
        n, m = map(len, sides)
        size = CostSize(n, m, embedding.width, 1, symmetric=sides[0] is sides[1])
        needed = self.needed
        if not embedding.empty:
            # They are float64, whatever the points are.
            wide = DOUBLE_BYTES * size.points * size.dim
            needed = max(needed, wide + operator_bytes(size, self.compute, self.device))
            check_memory(size, needed, self.device, self.compute.dtype)
        with within_memory(size, needed, self.device, self.compute.dtype):
            first = embedding.appended(sides[0], 0)
            last = first if sides[0] is sides[1] else embedding.appended(sides[1], 1)
        ground = self.ground
        if embedding.weight == 0:
            ground = GroundCost(embedding.lambda_x, 0.0)
        return replace(
            self,
            transformed=(first, last),
            classes=_class_table(None, (first, last), self.device),
            embedding=embedding,
            label_error=embedding.error,
            ground=ground,
            needed=needed,
        )

    def by_labels(self, gradient: Tensor) -> Tensor:
        """Pull a gradient by the class table back to that by W of labels."""
        sides = self.transformed[0], self.transformed[-1]
        return by_labels(gradient, sides) if has_sets(sides) else gradient

    def with_points(self, *transformed: LabeledSamples) -> Comparison:
        """Return the comparison of other, already transformed, points of the same classes.

        There are at most as many. They are on the device, or on the host if datasets are streamed.
        They have no columns of labels, and get those of this comparison.
        """
        if self.embedding is not None:
            places = (0, len(transformed) - 1)
            first, last = (self.embedding.appended(transformed[k], min(k, 1)) for k in places)
            return replace(self, given=transformed, transformed=(first, last))
        return replace(self, given=transformed, transformed=transformed)

    def unweighted(self, *places: int) -> Comparison:
        """Return the comparison of the same points, those of sides 0 or 1 with equal weights."""
        source, target = self.transformed
        sides = tuple(
            replace(side, weights=None) if place in places else side
            for place, side in enumerate((source, target))
        )
        return replace(self, given=sides, transformed=sides)

    def at(self, epsilon: float) -> Comparison:
        """Return the comparison at an epsilon, in units of the cost; 0 is of exact transport.

        Raises:
            EpsilonOutOfRange: it over- or underflows in the type of the scores, or the error of
                costs alone moves the marginals by `MOST_GROWTH`.
        """
        compute = self.compute
        if epsilon == 0:
            return replace(self, epsilon=0.0)
        if epsilon > torch.finfo(compute.dtype).max / 4:
            in_double = epsilon < torch.finfo(torch.float64).max / 4
            raise EpsilonOutOfRange(
                f"{{given}} overflows in precision={compute.precision}; lower {{name}}"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )
        if epsilon < torch.finfo(compute.dtype).tiny:
            in_double = (
                compute.dtype != torch.float64 and epsilon > WITHIN_DOUBLE * self._largest_cost()
            )
            raise EpsilonOutOfRange(
                f"{{given}} underflows in precision={compute.precision}; raise "
                f"{{name}}{', scale' if in_double else ' or scale'} the features up"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )
        if self.cost_error > MOST_GROWTH * epsilon:
            raise EpsilonOutOfRange(
                f"{{given}} is too small for ground={self.ground.ground}, whose costs are off by "
                f"up to {self.cost_error:.2g}: rounding alone moves the marginals by more than "
                f"{MOST_GROWTH:g}; centre the features, or raise {{name}} to about {{advised}}",
                epsilon,
                1.1 * self.cost_error / MOST_GROWTH,
            )
        return replace(self, epsilon=epsilon)

    def _largest_cost(self) -> float:
        """Return a bound on lambda_x ||x - y||^2."""
        largest = max(float(largest_entry(side.features)) for side in self.transformed)
        return self.ground.squared.lambda_x * self.transformed[0].dim * (2 * largest) ** 2

    @property
    def device(self) -> torch.device:
        streaming = self.streaming
        return self.given[0].features.device if streaming is None else streaming.device

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of points of the first and of the last dataset."""
        return len(self.transformed[0]), len(self.transformed[-1])

    @property
    def home(self) -> torch.device:
        """The device on which the points of the last dataset are stored."""
        return self.given[-1].features.device

    def given_points(self, place: int) -> Points:
        """Return a dataset's points before the transform, as a tensor or streamed."""
        return points_of(self.given[place], self.streaming)

    def transform(self, samples: LabeledSamples) -> LabeledSamples:
        """Return other samples, moved and transformed as the datasets are."""
        if self.streaming is not None:
            return samples
        return self.ground.transform(samples.to(self.device))

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of the divergence, the cross term first."""
        return TERMS if self.debias else TERMS[:1]

    def sides(self, term: str) -> tuple[LabeledSamples, LabeledSamples]:
        """Return the transformed datasets of rows and columns of the term "xy", "xx" or "yy"."""
        row, column = SIDES[term]
        return self.transformed[row], self._columns_side[column]

    @cached_property
    def _columns_side(self) -> tuple[LabeledSamples, ...]:
        """The transformed datasets as they stand on the side of a cost's columns."""
        if not self.signed:
            return self.transformed
        assert self.embedding is not None
        flipped = {side: self.embedding.flipped(side) for side in dict.fromkeys(self.transformed)}
        return tuple(flipped[side] for side in self.transformed)

    @property
    def signed(self) -> bool:
        """Whether self terms are of two different clouds, as columns of one change their sign."""
        return self.embedding is not None and self.embedding.negative > 0

    def points(self, term: str) -> tuple[Points, Points]:
        """Return the transformed points of both sides of a term, as tensors or streamed."""
        source, target = self.sides(term)
        x = points_of(source, self.streaming)
        return x, x if source is target else points_of(target, self.streaming)

    def block(self, term: str) -> Tensor:
        """Return the block of class distances of a term; [y, x] is never read.

        Raises:
            InputError: the block of a self term is not symmetric.
        """
        return self.classes.block(term)

    def cost(self, term: str) -> LabelledCost:
        """Build the cost of a term; statistics of a cloud are computed once for all terms.

        Raises:
            InputError: as for `block`.
        """
        return LabelledCost.of(
            *self.sides(term),
            self.block(term),
            lambda_x=self.ground.squared.lambda_x,
            lambda_y=self.ground.lambda_y,
            streaming=self.streaming,
        )

    def operator(
        self, term: str, cost: LabelledCost | None = None, *, keep_scores: bool = True
    ) -> Operator:
        """Build the operator of a term, in this process or shared by those of `compute.group`.

        Args:
            term: "xy", "xx" or "yy".
            cost: of the term, where the caller has built it.
            keep_scores: False for single passes, which storing scores would not speed up.

        Raises:
            InputError: the precision cannot hold the costs, or there is not enough memory.
        """
        if isinstance(ranks := self.compute.group, Ranks):
            from otdd_flash.operators.sharing import shared_operator

            return shared_operator(self, term, ranks, keep_scores=keep_scores)
        return build_operator(cost or self.cost(term), self.compute, keep_scores=keep_scores)

    @property
    def below_zero(self) -> bool:
        """Whether costs may be below 0, as W of several labels is that of no points."""
        table = self.classes.full
        below = has_sets(self.given) and bool(table.min() < -1e-9 * table.abs().max())
        return self.signed or below

    def mean_cost(self) -> float:
        """Compute the unit of `epsilon_relative`: the mean cost of the cross term.

        It is at most 0 if the mean is below the rounding error. For `inner`, whose costs may have
        any sign, it is the mean of lambda_x ||x_i|| ||y_j|| + lambda_y W[l_i, l_j].
        """
        ground, (source, target) = self.ground, self.sides("xy")
        lengths = ground.size(source, target)
        if lengths is None:
            mean = float(self.cost("xy").mean_cost) + self._signed_offset.value
            return mean if mean > ground.error(source.dim) else min(mean, 0.0)
        if ground.lambda_y == 0:
            return lengths
        classes = replace(self, ground=GroundCost(0.0, ground.lambda_y))
        return lengths + float(classes.cost("xy").mean_cost)

    @property
    def offset(self) -> Offset:
        """The separable terms of the cost in OT_epsilon; 0 if self terms cancel them."""
        if self.debias:
            return NO_OFFSET
        if self.signed:
            return self._signed_offset
        return self.ground.offset(self.transformed[0], self.transformed[-1])

    @cached_property
    def _signed_offset(self) -> Offset:
        """The separable terms that columns of negative sign add."""
        if self.embedding is None or not self.signed:
            return NO_OFFSET
        value, terms = 0.0, 0
        for side in self.transformed:
            of_rows = self.embedding.one_side(side)
            assert of_rows is not None
            value += float(side.masses @ of_rows)
            terms += len(side) + side.dim + 8
        # All summands have one sign.
        return Offset(value, terms * DOUBLE_UNIT * abs(value))

    @property
    def cost_error(self) -> float:
        """Bound on the error of the cost by that of transformed points and of the label cost."""
        return self.ground.error(self.transformed[0].dim) + self.label_error

    @property
    def diameter(self) -> float:
        """The diagonal of the smallest box around the first and the last dataset.

        Raises:
            InputError: it is 0.
        """
        x, y = self.transformed[0].features, self.transformed[-1].features
        lowest = torch.minimum(x.amin(0), y.amin(0)).double()
        highest = torch.maximum(x.amax(0), y.amax(0)).double()
        diagonal = float(torch.linalg.vector_norm(highest - lowest))
        if diagonal == 0:
            raise InputError(
                "solver.schedule=geomloss starts at the diameter of the features, which is 0 as "
                "all points are one; set solver.diameter"
            )
        return diagonal

    @property
    def identical(self) -> bool:
        """Whether both sides have equal samples and class distances."""
        return same_content(*self.transformed) and all(
            torch.equal(self.block("xx"), self.block(term)) for term in ("xy", "yy")
        )

    @property
    def mark(self) -> Mark:
        """A mark that changes when datasets or class distances are modified, see `fingerprint`."""
        sides = (mark_of(side) for side in self.given)
        tables = () if self.embedding is None else self.embedding.tables
        return (*chain(*sides), *mark_of_tensors(self.classes.full, *tables))

    def within_memory(self) -> within_memory:
        """Return a `with` block for work on the first and the last dataset, see `within_memory`."""
        size = cost_size(self.transformed[0], self.transformed[-1])
        return within_memory(size, self.needed, self.device, self.compute.dtype)


def _as_samples(cloud: LabeledSamples | Tensor) -> LabeledSamples:
    return cloud if isinstance(cloud, LabeledSamples) else LabeledSamples(cloud, None, ())


def _class_table(
    table: Tensor | None, transformed: Sequence[LabeledSamples], device: torch.device
) -> ClassTable:
    return ClassTable(table, (transformed[0].class_total, transformed[-1].class_total), device)


def _moved(
    datasets: Sequence[LabeledSamples],
    ground: GroundCost,
    device: torch.device,
    *,
    transformed: bool,
) -> tuple[tuple[LabeledSamples, ...], tuple[LabeledSamples, ...]]:
    """Return the datasets on the device, and the same with transformed points.

    An object that occurs several times is moved once. If `transformed`, points already are.
    """
    given = {side: side.to(device) for side in dict.fromkeys(datasets)}
    points = {side: one if transformed else ground.transform(one) for side, one in given.items()}
    if device.type != "cpu":
        for cloud in points.values():
            forget_cloud(cloud)
    return tuple(given[side] for side in datasets), tuple(points[side] for side in datasets)


def _streaming(
    datasets: Sequence[LabeledSamples],
    pairs: Iterable[Pair],
    compute: ComputeOptions,
    device: torch.device,
) -> Streaming | None:
    """Return how points are streamed if some are not on the device and do not fit; else None."""
    sides = dict.fromkeys(datasets)
    elsewhere = [side for side in sides if side.features.device != device]
    if not elsewhere and not any(isinstance(side.features, FileFeatures) for side in sides):
        return None
    moved = sum(side.features.nbytes for side in elsewhere)
    sizes = (cost_size(datasets[i], datasets[j]) for i, j in pairs)
    needed = moved + max((operator_bytes(size, compute, device) for size in sizes), default=0)
    stated = stated_budget(compute.memory_budget)
    if needed <= max(ASSUMED_FREE, stated or 0):
        return None
    free = free_memory(device)
    if stated is None and needed <= free:
        return None
    on_host = torch.device("cpu")
    host_room = 0 if device == on_host else int(HELD_SHARE * free_memory(on_host))
    if stated is None:
        return Streaming(device, int(STREAMED_SHARE * free), host_room)
    # The budget includes points that are on the device already.
    there = sum(
        side.features.nbytes
        for side in sides
        if side.features.device == device and not isinstance(side.features, FileFeatures)
    )
    return Streaming(device, max(stated - there, ASSUMED_FREE), host_room)


def _check_streamed(
    datasets: Sequence[LabeledSamples],
    ground: GroundCost,
    compute: ComputeOptions,
    *,
    transformed: bool,
) -> None:
    """Raise an `InputError` for what cannot be streamed: `cosine`, and ranks without files."""
    in_files = all(isinstance(side.features, FileFeatures) for side in datasets)
    if compute.group is not None and not in_files:
        raise InputError(
            "points that the device does not hold are streamed by the processes of compute.group "
            "from files that each of them reads; give features_file(...), leave out compute.group, "
            "or raise memory_budget"
        )
    if ground.ground == "cosine" and not transformed:
        raise InputError(
            "ground=cosine needs all points on the device, which does not hold them; divide the "
            "rows by their lengths before they are stored, and use ground=sqeuclidean with half of "
            "lambda_x"
        )


def _check_group(compute: ComputeOptions, device: torch.device) -> None:
    """Raise an `InputError` for a group whose shards were not combined, or the wrong device."""
    if compute.group is None:
        return
    ranks = ranks_of(compute.group)
    if compute.group is not ranks:
        raise InputError(
            "shards of a compute.group are put together by dataset_distance alone; lead other work "
            "from rank 0 with otdd.led"
        )
    ranks.device_of(device)


def check_comparable(*datasets: LabeledSamples, dimensions: bool = True) -> None:
    """Raise if distances between the points of some datasets are not defined.

    Without `dimensions` these may differ, where distances within each are compared.

    Raises:
        InputError: they differ in dimension or device, features are not finite, or their squared
            distances overflow.
    """
    for other in datasets[1:]:
        if dimensions:
            check_same_dimension(datasets[0], other)
        check_one_device(datasets[0].features.device, other.features.device)
    check_squares(*datasets)


def check_resources(
    datasets: Sequence[LabeledSamples],
    pairs: Iterable[Pair],
    compute: ComputeOptions,
    device: torch.device,
) -> int:
    """Raise, before any work is done, if the device cannot run the operators of some pairs.

    Returns:
        The least bytes of the largest operator and of the datasets that have to be moved.

    Raises:
        InputError: the backend cannot run on the device or in the precision, or there is not
            enough memory.
    """
    elsewhere = (side for side in dict.fromkeys(datasets) if side.features.device != device)
    moved = sum(side.features.nbytes for side in elsewhere)
    most = moved
    for i, j in pairs:
        size = cost_size(datasets[i], datasets[j])
        needed = moved + operator_bytes(size, compute, device)
        check_memory(size, needed, device, compute.dtype)
        most = max(most, needed)
    return most


def cost_size(source: LabeledSamples, target: LabeledSamples) -> CostSize:
    """Return the size of the cost between two clouds."""
    return CostSize(
        len(source), len(target), source.dim, source.class_total, symmetric=source is target
    )
