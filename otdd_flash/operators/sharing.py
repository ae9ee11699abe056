"""A cost whose passes several processes share: the operator of rank 0, and its construction.

`Comparison.operator` calls `shared_operator` on rank 0, which orders all ranks to hold their
`Parts` of the cost. Either every rank has both clouds, in memory or in files, or, if these are too
large for some rank, each has a shard of the points (`ring`). Ranks keep clouds by number for later
costs, until they are modified or deleted on rank 0.

Operations of a `ShardedOperator` order all ranks to run one function of `parts` on their `Parts`,
which exchanges the results; only samples, and expected costs of a self term whose pairs are
divided, are rank 0's own. So a new operation needs its function in `parts`, and all ranks must call
the same collectives in it. `flows.stepping` recognises a `ShardedOperator`, and `solver.exact`
takes the operator for one where `compute.group` is `Ranks`; both order the ranks by its `number`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions, uses_triton
from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.host_points import HostPoints, Streaming
from otdd_flash.cost.points import (
    LabelledCost,
    LessOrigin,
    Masses,
    Points,
    class_indices,
    squared_distances,
)
from otdd_flash.cost.rounding import float16_rounding, lattice_of
from otdd_flash.distributed.ranks import Numbers, Ranks
from otdd_flash.features.file_features import FeatureFile, FileFeatures, features_of
from otdd_flash.fingerprint import mark_of
from otdd_flash.memory import ASSUMED_FREE, budget_in_bytes, free_memory, stated_budget
from otdd_flash.operators import parts
from otdd_flash.operators.base import (
    ALL,
    Applied,
    Epsilon,
    EvaluatedPlan,
    Factors,
    Make,
    Marginals,
    Operator,
    PlanBlock,
)
from otdd_flash.operators.blocked import Build as BlockBuild
from otdd_flash.operators.build import build_operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.parts import FIRST, Build, Owned, Parts, cost_error
from otdd_flash.operators.ring import ring_parts
from otdd_flash.operators.self_share import FoldedPairs, SelfShare, folded
from otdd_flash.samples import LabeledSamples, unchecked

# Operators that a process holds for one cost: a part by rows and one by columns, or, for a self
# term, two squares and two rectangles.
PARTS, SELF_PARTS = 2, 4

# Ranks are not asked for their free memory if the last answers were this many times what is needed.
AMPLE = 4

# Bytes of a coordinate with its packed form, over those of the coordinate.
PACKED = 2

# The datasets of the rows and of the columns of a cost.
Sides = tuple[LabeledSamples, LabeledSamples]


def shared_operator(
    comparison: Comparison, term: str, ranks: Ranks, *, keep_scores: bool
) -> ShardedOperator:
    """Build the operator of rank 0, and the parts of the cost on every rank.

    If some rank has no memory for all points, each holds a shard, and shards circulate in a ring.

    Raises:
        InputError: a rank has not enough memory.
    """
    compute, sides = comparison.compute.alone, comparison.sides(term)
    if comparison.streaming is None and _in_a_ring(sides, ranks, comparison.compute):
        cost, keep_scores = comparison.cost(term), False
        number, found = _share_in_ring(sides, ranks, cost, compute)
    else:
        number, found = _share_clouds(comparison, term, ranks, keep_scores=keep_scores)
        cost = ranks.held[number].cost

    def sampled(sample: LabelledCost) -> Operator:
        return build_operator(sample, compute, keep_scores=keep_scores)

    return ShardedOperator(ranks, number, cost, found, sampled)


def _in_a_ring(sides: Sides, ranks: Ranks, compute: ComputeOptions) -> bool:
    """Whether all points of both sides, with their packed form, exceed the memory of some rank."""
    clouds = dict.fromkeys(sides)
    needed = sum(PACKED * cloud.features.nbytes for cloud in clouds)
    if needed <= ASSUMED_FREE:
        return False
    stated = stated_budget(compute.memory_budget)
    if stated is not None:
        return needed > stated
    device = sides[0].features.device
    now, (then, least) = _room(ranks, device), ranks.room.get(device, (0, 0))
    # Free memory of other ranks changes about as it does here; ask again well before it is short.
    if needed > (least - max(0, then - now)) / AMPLE:
        least = ranks.order(_least_room, device)
        ranks.room[device] = now, least
    return needed > least


def _least_room(ranks: Ranks, device: torch.device) -> int:
    """Return the least memory that any rank has free for points."""
    return min(ranks.all_gathered_objects(_room(ranks, ranks.device_of(device))))


def _room(ranks: Ranks, device: torch.device) -> int:
    """Return the memory that is free for points of this rank."""
    return free_memory(device) // (1 if device.type == "cuda" else ranks.size)


def _share_in_ring(
    sides: Sides, ranks: Ranks, cost: LabelledCost, compute: ComputeOptions
) -> tuple[int, float]:
    """Have every rank hold its shards of both sides, and all of the cost but the points.

    Returns:
        The number under which ranks hold their parts, and the cost error.
    """
    if uses_triton(compute, cost.a.device):
        # Computed and cached here: other ranks have only shards.
        lattice_of(cost)
    numbers = [_shards(ranks, cloud) for cloud in sides]
    first = cost.points[0][:1], cost.points[1][:1]
    ranks.layout, number = "ring", ranks.number()
    found = ranks.order(_hold_ring, number, *numbers, *first, compute, cost.without_points())
    return number, found


def _shards(ranks: Ranks, cloud: LabeledSamples) -> int:
    """Return the number under which ranks hold their shards of a cloud, sent if it is new."""

    def send(number: int) -> None:
        owned = Owned.by_class(class_indices(cloud))
        for rank in range(ranks.size):
            ranks.order(_hold_shard, number, rank, cloud.features[owned.of(ranks, rank)])

    return _number_of(ranks, ranks.ring_numbers, cloud, send)


def _hold_shard(ranks: Ranks, number: int, owner: int, points: Tensor) -> None:
    if ranks.rank == owner:
        ranks.held[number] = points


def _hold_ring(
    ranks: Ranks,
    number: int,
    source: int,
    target: int,
    first_x: Tensor,
    first_y: Tensor,
    compute: ComputeOptions,
    bare: LabelledCost,
) -> float:
    build = cast(BlockBuild, partial(build_operator, compute=compute, keep_scores=False))
    points = ranks.held[source], ranks.held[target]
    ranks.held[number] = ring_parts(ranks, bare, points, (first_x, first_y), build)
    return cost_error(ranks, number)


def _number_of(
    ranks: Ranks, numbers: Numbers, cloud: LabeledSamples, send: Callable[[int], None]
) -> int:
    """Return the number under which ranks hold a cloud, sending it if it is new or changed."""
    mark = mark_of(cloud)
    known, held = numbers.get(cloud, (None, ()))
    if known is not None and held == mark:
        return known
    if known is not None:
        ranks.drop(known)
    number = ranks.number()
    send(number)
    # After sending, as ranks may have refused it.
    numbers[cloud] = number, mark
    weakref.finalize(cloud, ranks.drop, number)
    return number


def _there(ranks: Ranks, sent: Tensor | int | None) -> Tensor | None:
    """Return the tensor that was sent, or this rank's copy of it."""
    return ranks.held[sent] if isinstance(sent, int) else sent


def _share_clouds(
    comparison: Comparison, term: str, ranks: Ranks, *, keep_scores: bool
) -> tuple[int, float]:
    """Have every rank hold both clouds, or files of them, and its parts of the cost.

    Clouds that ranks do not have yet are sent with the order.

    Returns:
        The number under which ranks hold their parts, and the cost error.
    """
    compute, streaming = comparison.compute.alone, comparison.streaming
    if streaming is not None:
        ranks.layout = "streamed"
        streaming = _of_one_rank(streaming, ranks, compute)
    new: dict[int, LabeledSamples] = {}

    def number_of(cloud: LabeledSamples) -> int:
        def send(number: int) -> None:
            new[number] = cloud
            # Weak: a cloud lives as long as rank 0 uses it.
            ranks.held[number] = weakref.ref(cloud)

        return _number_of(ranks, ranks.numbers, cloud, send)

    source, target = comparison.sides(term)
    sides = number_of(source), number_of(target)
    sent = [_Sent(number, cloud.class_names) for number, cloud in new.items()]
    number = ranks.number()
    cost = comparison.block(term), comparison.ground
    given = number, sides, *cost, compute, keep_scores, streaming
    try:
        tensors = [each for cloud in new.values() for each in _described(ranks, cloud)]
        found = ranks.order(_hold_parts, *given, sent, *tensors)
    except BaseException:
        # Some rank may have refused them: send them again next time.
        for cloud in new.values():
            ranks.numbers.pop(cloud, None)
        raise
    return number, found


class _Sent(NamedTuple):
    """A cloud that is sent with an order: its number, and the names of its classes."""

    number: int
    class_names: tuple[str, ...]


def _described(ranks: Ranks, cloud: LabeledSamples) -> tuple[Any, Any, Any]:
    """Return features, labels and weights to send: tensors, a file, or numbers of copies."""
    features = cloud.features
    there = features.file if isinstance(features, FileFeatures) else _as_sent(ranks, features)
    return there, _as_sent(ranks, cloud.labels), _as_sent(ranks, cloud.weights)


def _as_sent(ranks: Ranks, tensor: Tensor | None) -> Tensor | int | None:
    """Return the tensor to be sent, or the number under which ranks have copies of it."""
    copied = ranks.copied.get(id(tensor))
    return tensor if copied is None else copied.sent()


def _hold_parts(
    ranks: Ranks,
    number: int,
    sides: tuple[int, int],
    block: Tensor,
    ground: GroundCost,
    compute: ComputeOptions,
    keep_scores: bool,
    streaming: Streaming | None,
    sent: list[_Sent],
    *tensors: Any,
) -> float:
    if streaming is not None and ranks.rank > 0:
        streaming = replace(streaming, device=ranks.device_of(streaming.device))
    made: dict[int, LabeledSamples] = {}
    # Rank 0 has checked what ranks have copies of.
    certain = not any(isinstance(each, Tensor | FeatureFile) for each in tensors)

    def cost() -> LabelledCost:
        if ranks.rank > 0:
            described = zip(*[iter(tensors)] * 3, strict=True)
            for cloud, of in zip(sent, described, strict=True):
                make = _unchecked if certain else _made
                made[cloud.number] = make(ranks, cloud.class_names, *of)
        x, y = (made[side] if side in made else ranks.held[side]() for side in sides)
        lambda_x, lambda_y = ground.squared.lambda_x, ground.lambda_y
        return LabelledCost.of(
            x, y, block, lambda_x=lambda_x, lambda_y=lambda_y, streaming=streaming
        )

    whole = cost() if certain else ranks.together(cost)
    if not any(isinstance(points, HostPoints | FileFeatures) for points in whole.points):
        whole.squares = _squares_by_owners(ranks, whole)

    def made_parts() -> Parts:
        share, each = _kernel_share, compute
        if not uses_triton(compute, whole.a.device):
            budget = budget_in_bytes(compute.memory_budget, whole.a.device)
            each = replace(compute, memory_budget=budget // _holders(ranks, compute, whole))
            share = _block_share

        def build(part: LabelledCost) -> Operator:
            return build_operator(part, each, keep_scores=keep_scores)

        return Parts.replicated(whole, ranks, build, share if streaming is None else None)

    ranks.held[number] = ranks.together(made_parts)
    for each, cloud in made.items():
        ranks.held[each] = partial(_itself, cloud)
    return cost_error(ranks, number)


def _made(
    ranks: Ranks,
    class_names: tuple[str, ...],
    features: Tensor | FeatureFile | int,
    labels: Tensor | int | None,
    weights: Tensor | int | None,
) -> LabeledSamples:
    """Build, on this rank, the cloud that `_described` sent."""
    there: Any
    if isinstance(features, FeatureFile):
        there = features_of(features.reopened())
    else:
        there = _there(ranks, features)
    return LabeledSamples(there, _there(ranks, labels), class_names, _there(ranks, weights))


def _unchecked(
    ranks: Ranks,
    class_names: tuple[str, ...],
    features: int,
    labels: int | None,
    weights: int | None,
) -> LabeledSamples:
    """Build the same of copies that this rank has of tensors which rank 0 has checked."""
    return unchecked(
        class_names, ranks.held[features], _there(ranks, labels), _there(ranks, weights)
    )


def _squares_by_owners(ranks: Ranks, cost: LabelledCost) -> tuple[Tensor, Tensor]:
    """Compute `LabelledCost.squares`, a share of either cloud's points on each rank."""
    found = []
    for points in cost.held[: 2 - cost.symmetric]:
        count = len(points)
        own = squared_distances(points[ranks.share(count)], cost.centre)
        found.append(ranks.gathered(own, count))
    return found[0], found[-1]


def _itself(cloud: LabeledSamples) -> LabeledSamples:
    return cloud


def _of_one_rank(streaming: Streaming, ranks: Ranks, compute: ComputeOptions) -> Streaming:
    """Divide the memory for streaming among ranks and their parts; statistics are of rank 0."""
    room = streaming.room
    if streaming.device.type == "cpu" and compute.memory_budget == "auto":
        room //= ranks.size
    return replace(streaming, room=room, host_room=streaming.host_room // (PARTS * ranks.size))


def _block_share(cost: LabelledCost, ranks: Ranks, build: Build) -> tuple[SelfShare, Operator]:
    """Build this rank's share of a self term in PyTorch, and an operator that runs like it."""
    ranges = folded(cost.shape[0], ranks.rank, ranks.size)
    share = FoldedPairs(cost, ranges, cast(BlockBuild, build))
    return share, build(cost.part(FIRST, FIRST))


def _kernel_share(cost: LabelledCost, ranks: Ranks, build: Build) -> tuple[SelfShare, Operator]:
    """Build this rank's share of a self term in Triton, and the operator of the whole."""
    # Triton is not everywhere.
    from otdd_flash.operators.triton_operator import KernelOperator, KernelSelfShare

    whole = build(cost)
    assert isinstance(whole, KernelOperator)
    # The part by rows reuses the packed points.
    cost.packed = whole.packed
    return KernelSelfShare(whole, (ranks.rank, ranks.size)), whole


def _holders(ranks: Ranks, compute: ComputeOptions, cost: LabelledCost) -> int:
    """Count the operators that share a budget; on a processor those of all ranks do for `auto`."""
    alone = cost.a.is_cuda or compute.memory_budget != "auto"
    own = SELF_PARTS if cost.symmetric else PARTS
    return own if alone else own * ranks.size


class ShardedOperator:
    """A cost between two labelled clouds that ranks share, on rank 0.

    Args:
        ranks: the processes that share it.
        number: under which ranks hold their `Parts`.
        cost: the whole cost.
        error: its `CostFacts.error`.
        sampled: builds the operator of a sample of the cost, for this process alone.
    """

    def __init__(
        self, ranks: Ranks, number: int, cost: LabelledCost, error: float, sampled: Build
    ) -> None:
        self.ranks, self.number, self._error, self._sampled = ranks, number, error, sampled
        weakref.finalize(self, ranks.drop, number)
        held: Parts = ranks.held[number]
        self._by_pairs = held.share is not None
        self._refines = held.representative.refined is not held.representative
        ring = held.cost is not cost
        of_one = held.representative.passes
        backend = f"{of_one.backend}, {ranks.size} ranks{', points in a ring' if ring else ''}"
        # Ranks wait for each other in every pass.
        self.passes = of_one._replace(backend=backend, recorded=False)
        self.replicated = not ring and isinstance(cost.points[0], Tensor)
        self.cost = cost
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        self._refined: ShardedOperator | None = None

    @cached_property
    def costs(self) -> CostFacts:
        cost = self.cost
        rounding = float16_rounding(cost) if self._refines and not cost.symmetric else 0.0
        facts = self.passes.dtype, cost.mean_cost, *cost.cost_range, self._error
        return CostFacts(*facts, rounding=rounding)

    @property
    def refined(self) -> ShardedOperator:
        """The same cost at full accuracy; built once, for the end of a solve and its gradient."""
        if not self._refines:
            return self
        if self._refined is None:
            ranks, number = self.ranks, self.ranks.number()
            ranks.order(parts.refine, self.number, number)
            self._refined = ShardedOperator(ranks, number, self.cost, self._error, self._sampled)
        return self._refined

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> Operator:
        """Return the cost between some rows and columns, with other masses, of this process."""
        return self._sampled(self.cost.sample(rows, columns, masses))

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of rows over some columns (l,), int64, with potentials g (l,)."""
        return self.ranks.order(parts.softmin_over, self.number, columns, g, epsilon)

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self._by_pairs:
            return self.ranks.order(parts.softmin_self, self.number, g, epsilon)
        return self.ranks.order(parts.softmin, self.number, False, g, epsilon, guess)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential f of a self term, which is near T(f)."""
        return self.softmin_rows(f, epsilon, f)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        if self.cost.symmetric:
            return self.softmin_rows(f, epsilon, guess)
        return self.ranks.order(parts.softmin, self.number, True, f, epsilon, guess)

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute the row and column sums of the plan of f (n,) and g (m,)."""
        if g is None and self._by_pairs:
            return self.ranks.order(parts.marginals_self, self.number, f, epsilon, accurate)
        return self.ranks.order(parts.marginals, self.number, f, g, epsilon, accurate)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> SharedPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return SharedPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
        if self._by_pairs:
            return self.cost.expected_costs(masses)
        return self.ranks.order(parts.expected_costs, self.number, masses)


class SharedPlan(EvaluatedPlan):
    """A plan whose products ranks share; see `EvaluatedPlan`."""

    operator: ShardedOperator

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        operator, (f, g, epsilon), (left, right) = self.operator, self._at, factors or (None, None)
        if transposed and operator.cost.symmetric:
            # P^T is the plan with f and g exchanged.
            f, g, left, right, transposed = g, f, right, left, False
        given = operator.number, transposed, f, g, epsilon, values, left, right
        return operator.ranks.order(parts.apply_plan, *given)

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        operator, (f, g, epsilon), own = self.operator, self._at, points[transposed]
        if not (operator.replicated and isinstance(make, LessOrigin)):
            yield from super().blocks(points, make, transposed=transposed)
            return
        # Ranks have the points and compute the values: none are sent.
        if transposed and operator.cost.symmetric:
            f, g, transposed = g, f, False
        given = operator.number, transposed, f, g, epsilon, make.origin
        applied = operator.ranks.order(parts.apply_plan_to_points, *given)
        yield PlanBlock(ALL, own[ALL.rows], applied)
