"""From two labelled clouds to the cost between them as an operator that processes share."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, CostInputs, labelled_cost, operator_alone
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.memory import budget_in_bytes
from otdd_flash.operators.parts import Build, Parts
from otdd_flash.operators.self_share import SelfShare, TiledSelfShare, folded
from otdd_flash.operators.sharded import ShardedOperator
from otdd_flash.operators.tiled import TiledOperator
from otdd_flash.ranks import Ranks
from otdd_flash.samples import LabeledSamples

# What a process holds of one cost: a part by rows and one by columns, or two squares and two
# rectangles of a cloud with itself.
PARTS, SELF_PARTS = 2, 4


def shared_operator(inputs: CostInputs, ranks: Ranks, *, keep_scores: bool) -> ShardedOperator:
    """The operator that rank 0 has, of parts on every rank.

    Raises:
        InputError: a rank has not enough memory.
    """
    numbers = [_number(ranks, cloud) for cloud in (inputs.source, inputs.target)]
    number, compute = ranks.number(), inputs.compute.alone
    block, cost = inputs.class_distances, inputs.cost
    ranks.order(_hold_parts, number, *numbers, block, cost, compute, keep_scores)
    return ShardedOperator(
        ranks, number, lambda sample: operator_alone(sample, compute, keep_scores=keep_scores)
    )


def _number(ranks: Ranks, cloud: LabeledSamples) -> int:
    """What ranks call a cloud, which they are given where they do not hold it."""
    if cloud not in ranks.numbers:
        number = ranks.numbers[cloud] = ranks.number()
        parts = cloud.features, cloud.labels, cloud.weights
        ranks.order(_hold_cloud, number, *parts, cloud.class_names)
        # It lives as long as what rank 0 does with it.
        ranks.held[number] = weakref.ref(cloud)
        weakref.finalize(cloud, ranks.drop, number)
    return ranks.numbers[cloud]


def _hold_cloud(
    ranks: Ranks,
    number: int,
    features: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    class_names: tuple[str, ...],
) -> None:
    if ranks.rank > 0:
        cloud = LabeledSamples(features, labels, class_names, weights)
        ranks.held[number] = lambda: cloud


def _hold_parts(
    ranks: Ranks,
    number: int,
    source: int,
    target: int,
    block: Tensor,
    cost: Any,
    compute: ComputeOptions,
    keep_scores: bool,
) -> None:
    clouds = ranks.held[source](), ranks.held[target]()

    def parts() -> Parts:
        whole = labelled_cost(CostInputs(*clouds, block, cost, compute))
        budget = budget_in_bytes(compute.memory_budget, whole.a.device)
        each = replace(compute, memory_budget=budget // _holders(ranks, compute, whole))

        def build(part: LabelledCost) -> Operator:
            return operator_alone(part, each, keep_scores=keep_scores)

        return Parts(whole, ranks, build, _self_share)

    ranks.held[number] = ranks.together(parts)


def _self_share(cost: LabelledCost, ranks: Ranks, build: Build) -> SelfShare:
    """This rank's share of the cost of a cloud with itself, where its passes run."""
    first = build(cost.part(slice(0, 1), slice(0, 1)))
    if isinstance(first, TiledOperator):
        return TiledSelfShare(cost, folded(cost.shape[0], ranks.rank, ranks.size), build)
    whole: Any = build(cost)
    share: SelfShare = whole.self_share(ranks.rank, ranks.size)
    return share


def _holders(ranks: Ranks, compute: ComputeOptions, cost: LabelledCost) -> int:
    """How many parts a budget is for; half of what a machine has free is for all its ranks."""
    alone = cost.a.is_cuda or compute.memory_budget != "auto"
    own = SELF_PARTS if cost.symmetric else PARTS
    return own if alone else own * ranks.size
