"""Entry points on several processes, each of which holds a shard of every dataset.

`takes_shards` decorates `otdd.dataset_distance`. The shards are joined in the order of the ranks
(the numbers of the processes in their group), and rank 0 leads the computation, so that the result
is that of one process with all rows. A change must respect that all ranks run the same collectives,
as a rank that misses one leaves the others waiting. Checks of a rank's own input therefore run
inside `ranks.together`, which raises the error of one rank on all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import reduce, wraps
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

import torch

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.distributed.ranks import Ranks, check_versions, ranks_of
from otdd_flash.errors import InputError
from otdd_flash.samples import LEAST_MASS, MOST_MASS, NO_MASS, LabeledSamples

P = ParamSpec("P")
T = TypeVar("T")

# If there are more names than this, ranks compare a digest, which keeps the error short.
MOST_NAMES = 20

ADVICE = "start every rank in the same way"


def takes_shards(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let an entry point be called by all processes of `compute.group`, each with its shards.

    Rank 0 then computes as one process would, leading the others, and all return its result.

    Args:
        *names: names of the arguments that are shards of datasets.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                # The call fails again, in the function, whose error names it.
                return function(*args, **kwargs)
            compute = ComputeOptions.of(bound.arguments.get("compute"))
            # One process, or a call inside `otdd.led`: there `group` is a `Ranks`, and the datasets
            # are whole.
            if compute.group is None or isinstance(compute.group, Ranks):
                return function(*args, **kwargs)
            ranks = ranks_of(compute.group)
            given = {name: bound.arguments[name] for name in names}
            settings = {key: value for key, value in bound.arguments.items() if key not in names}
            bound.arguments |= _whole_datasets(ranks, given, {**settings, "compute": compute})
            bound.arguments["compute"] = replace(compute, group=ranks)
            # Rank 0 calls the function; the others serve its passes and get a copy of the result.
            return ranks.led(lambda: function(*bound.args, **bound.kwargs))

        return called

    return decorate


def _whole_datasets(
    ranks: Ranks, given: dict[str, Samples], settings: dict[str, Any]
) -> dict[str, LabeledSamples]:
    """Join the shards of all ranks, in the order of the ranks.

    Raises:
        InputError: a part of the samples is refused, or ranks disagree. Every rank raises it.
    """

    def made() -> dict[str, LabeledSamples]:
        return {
            # `as_samples` refuses samples without mass, which one shard of several may be.
            name: side.detached() if isinstance(side, LabeledSamples) else as_samples(side, name)
            for name, side in given.items()
        }

    # Of otdd_flash and torch.
    check_versions(ranks)
    # Settings with a function are not compared: its repr has another address in every process.
    said = {key: repr(value) for key, value in settings.items()}
    said = {key: value for key, value in said.items() if " at 0x" not in value}
    ranks.check_same("settings", said, ADVICE)
    sides = ranks.together(made)
    whole: dict[LabeledSamples, LabeledSamples] = {}
    for name, side in sides.items():
        # One object may be both datasets; samples are equal only to themselves.
        whole[side] = whole[side] if side in whole else _whole(ranks, name, side)
    return {name: whole[side] for name, side in sides.items()}


def _whole(ranks: Ranks, name: str, shard: LabeledSamples) -> LabeledSamples:
    def check() -> None:
        # Called for its error: a group of nccl moves no tensors from the CPU.
        ranks.device_of(shard.features.device)
        if not (LEAST_MASS < shard.mass < MOST_MASS or shard.without_mass):
            raise InputError(
                f"{name}: the weights of a shard add up to {shard.mass:.0e} or beyond; bring those "
                "of all shards to another unit"
            )
        if shard.label_sets is not None:
            raise InputError(
                f"{name}: shards of rows with several labels are not put together; give each "
                "process all rows, and lead the work from rank 0 with otdd.led"
            )

    ranks.together(check)
    # A shard without names of features, as of an array, takes those of the others.
    named = [names for names in ranks.all_gathered_objects(shard.feature_names) if names]
    feature_names = shard.feature_names or next(iter(named), None)
    for what, content in (
        ("the number of features", shard.dim),
        ("names of features", _short(feature_names)),
        ("whether there are labels", shard.labels is not None),
        ("whether there are weights", shard.weights is not None),
        ("whether there are numbers", shard.targets is not None),
        ("class names", _short(shard.class_names)),
    ):
        advice = "a shard may lack rows of a class, but names all classes and columns in one order"
        ranks.check_same(f"{what} of {name}", content, advice)
    # Integers became float32 or float64 by the numbers of their own shard; all take the wider type.
    dtypes = ranks.all_gathered_objects(shard.features.dtype)
    features = ranks.concatenated(shard.features.to(reduce(torch.promote_types, dtypes)))
    labels = None if shard.labels is None else ranks.concatenated(shard.labels)
    weights = None
    if shard.weights is not None:
        # Weights of a shard sum to 1. In units of the heaviest shard the sum of all is finite.
        heaviest = max(ranks.all_gathered_objects(shard.mass))
        weights = ranks.concatenated(shard.weights * (shard.mass / heaviest))
        if not weights.any():
            raise InputError(f"{name}: {NO_MASS}, as they are in all shards")
    # `subset_hash` and `mass` describe a shard; the whole is a dataset by itself.
    return replace(
        shard,
        features=features,
        labels=labels,
        weights=weights,
        targets=None if shard.targets is None else ranks.concatenated(shard.targets),
        subset_hash=None,
        mass=1.0,
        feature_names=feature_names,
    )


def _short(names: tuple[str, ...] | None) -> Any:
    """Return names as ranks compare them: a digest if there are many."""
    if names is None or len(names) <= MOST_NAMES:
        return names
    # Names may hold lone surrogates, which UTF-8 alone refuses.
    digest = sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(names)} of digest {digest[:16]}"
