"""Entry points on several processes, each of which holds a shard of every dataset.

`takes_shards` decorates `otdd.dataset_distance`. The shards are joined in the order of the ranks,
and rank 0 leads the computation, so that the result is that of one process with all rows. A change
must respect that all ranks run the same collectives, also if one of them has bad input: checks run
inside `ranks.together`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import reduce, wraps
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

import torch

from otdd_flash.data.given import Samples, as_samples
from otdd_flash.distributed.ranks import Ranks, check_versions, ranks_of
from otdd_flash.errors import InputError
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.samples import LEAST_MASS, MOST_MASS, NO_MASS, LabeledSamples

P = ParamSpec("P")
T = TypeVar("T")

# Number of class names in an error.
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
                # Python's own error names the function.
                return function(*args, **kwargs)
            compute = ComputeOptions.of(bound.arguments.get("compute"))
            ranks = ranks_of(compute.group)
            if ranks is None or ranks is compute.group:
                return function(*args, **kwargs)
            given = {name: bound.arguments[name] for name in names}
            settings = {key: value for key, value in bound.arguments.items() if key not in names}
            bound.arguments |= _whole_datasets(ranks, given, {**settings, "compute": compute})
            bound.arguments["compute"] = replace(compute, group=ranks)
            return ranks.led(lambda: function(*bound.args, **bound.kwargs))

        return called

    return decorate


def _whole_datasets(
    ranks: Ranks, given: dict[str, Samples], settings: dict[str, Any]
) -> dict[str, LabeledSamples]:
    """Join the shards of all ranks, in the order of the ranks.

    Raises:
        InputError: as for the parts of samples, or ranks disagree; on every rank.
    """

    def made() -> dict[str, LabeledSamples]:
        return {
            # A shard may have no mass if others have some.
            name: side.detached() if isinstance(side, LabeledSamples) else as_samples(side, name)
            for name, side in given.items()
        }

    check_versions(ranks)
    # The repr of a function has another address in every process.
    said = {key: repr(value) for key, value in settings.items()}
    said = {key: value for key, value in said.items() if " at 0x" not in value}
    ranks.check_same("settings", said, ADVICE)
    sides = ranks.together(made)
    whole: dict[LabeledSamples, LabeledSamples] = {}
    for name, side in sides.items():
        # One object may be both datasets.
        whole[side] = whole[side] if side in whole else _whole(ranks, name, side)
    return {name: whole[side] for name, side in sides.items()}


def _whole(ranks: Ranks, name: str, shard: LabeledSamples) -> LabeledSamples:
    def check() -> None:
        ranks.device_of(shard.features.device)
        if not (LEAST_MASS < shard.mass < MOST_MASS or shard.without_mass):
            raise InputError(
                f"{name}: the weights of a shard add up to {shard.mass:.0e} or beyond; bring those "
                "of all shards to another unit"
            )

    ranks.together(check)
    class_names: Any = shard.class_names
    if len(class_names) > MOST_NAMES:
        digest = sha256("\0".join(class_names).encode("utf-8", "surrogatepass")).hexdigest()
        class_names = f"{len(class_names)} of digest {digest[:16]}"
    for what, content in (
        ("the number of features", shard.dim),
        ("whether there are labels", shard.labels is not None),
        ("whether there are weights", shard.weights is not None),
        ("class names", class_names),
    ):
        advice = "a shard may lack rows of a class, but names all classes in one order"
        ranks.check_same(f"{what} of {name}", content, advice)
    # Integers take, in each shard, the floating-point type that holds that shard's.
    dtypes = ranks.all_gathered_objects(shard.features.dtype)
    features = ranks.concatenated(shard.features.to(reduce(torch.promote_types, dtypes)))
    labels = None if shard.labels is None else ranks.concatenated(shard.labels)
    weights = None
    if shard.weights is not None:
        # In units of the heaviest shard, so that their sum is finite.
        heaviest = max(ranks.all_gathered_objects(shard.mass))
        weights = ranks.concatenated(shard.weights * (shard.mass / heaviest))
        if not weights.any():
            raise InputError(f"{name}: {NO_MASS}, as they are in all shards")
    return replace(
        shard, features=features, labels=labels, weights=weights, subset_hash=None, mass=1.0
    )
