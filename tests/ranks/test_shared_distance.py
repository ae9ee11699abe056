"""Whole distances that ranks share: the numbers of one process, and the truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from rank_pool import lead, pool

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON = 0.4


def datasets() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    sides = []
    for size, classes in ((61, 4), (45, 3)):
        labels = torch.randint(0, classes, (size,), generator=draw)
        points = torch.randn(size, 3, generator=draw) + labels[:, None]
        sides.append(otdd.LabeledSamples(points, labels, tuple("abcd"[:classes])))
    return sides[0], sides[1]


def summary(result: otdd.DistanceResult) -> dict[str, Any]:
    divergence = result.divergence
    return {
        "value": result.value,
        "bounds": result.bounds,
        "f": divergence.xy.f,
        "g": divergence.xy.g,
        "converged": result.converged,
        "backend": divergence.backend,
        "stopped_by": divergence.stopped_by,
        # Asked of every rank by itself, also of rank 0 alone.
        "coupling": result.class_coupling(),
        "content": result.to_dict(),
        "fingerprints": (result.source.fingerprint, result.target.fingerprint),
    }


def of_shards(uneven: bool, precision: str) -> dict[str, Any]:
    """The distance of shards; uneven ones give nearly all rows to the last rank."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shards = []
    for side in datasets():
        count = len(side)
        ends = [end * count // size for end in range(size + 1)]
        if uneven:
            ends = [*range(size), count]
        shards.append(side.take(torch.arange(ends[rank], ends[rank + 1])))
    world = torch.distributed.group.WORLD
    compute = otdd.ComputeOptions("cpu", precision=precision, group=world)
    return summary(otdd.dataset_distance(*shards, epsilon=EPSILON, compute=compute))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("size", "uneven", "precision"), [(2, True, "fast"), (3, False, "double")])
def test_shards_have_the_distance_of_the_whole(size: int, uneven: bool, precision: str) -> None:
    answers = pool(size).run(of_shards, uneven, precision)
    source, target = datasets()
    alone = otdd.dataset_distance(
        source, target, epsilon=EPSILON, compute=otdd.ComputeOptions("cpu", precision=precision)
    )
    first = answers[0]
    for other in answers[1:]:
        assert torch.equal(first["f"], other["f"])
        assert torch.equal(first["g"], other["g"])
        assert (first["value"], first["bounds"]) == (other["value"], other["bounds"])
    again = pool(size).run(of_shards, uneven, precision)[0]
    assert torch.equal(first["f"], again["f"])
    assert (first["value"], first["bounds"]) == (again["value"], again["bounds"])
    assert first["converged"]
    assert first["fingerprints"] == (source.fingerprint, target.fingerprint)
    assert first["backend"].endswith(f"{size} ranks")
    assert first["content"]["ranks"] == size
    assert first["content"]["bytes_moved"] > 0
    assert torch.allclose(first["coupling"], alone.class_coupling(), atol=1e-4)
    assert first["value"] == pytest.approx(alone.value, abs=1e-6)
    assert torch.allclose(first["f"].double(), alone.potentials[0].double(), atol=1e-4)
    truth = true_divergence(source, target, alone.class_distances.full)
    lower, upper = first["bounds"]
    assert lower <= truth <= upper
    assert upper - lower < 0.01 * truth


def of_relaxed_shards() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    shards = [side.take(torch.arange(rank, len(side), 2)) for side in datasets()]
    compute = otdd.ComputeOptions("cpu", group=torch.distributed.group.WORLD)
    found = otdd.dataset_distance(*shards, epsilon=EPSILON, unbalanced=1.5, compute=compute)
    return {**summary(found), "mass": found.divergence.xy.mass}


@pytest.mark.slow
def test_shards_with_relaxed_marginals() -> None:
    first, other = pool(2).run(of_relaxed_shards)
    assert torch.equal(first["f"], other["f"])
    # Rows of shards stand in another order.
    alone = otdd.dataset_distance(*datasets(), epsilon=EPSILON, unbalanced=1.5, compute="cpu")
    assert first["value"] == pytest.approx(alone.value, rel=1e-5)
    assert first["mass"] == pytest.approx(alone.divergence.xy.mass, rel=1e-3)
    assert first["bounds"][0] <= alone.bounds[1]
    assert alone.bounds[0] <= first["bounds"][1]


INTEGERS = torch.tensor([[1], [5], [(1 << 24) + 1], [(1 << 24) + 3]])


def of_integer_shards() -> tuple[str, float]:
    """Those of the last rank alone are no numbers of float32."""
    rank = torch.distributed.get_rank()
    compute = otdd.ComputeOptions("cpu", group="world", precision="double")
    shard = INTEGERS[2 * rank : 2 * rank + 2]
    result = otdd.dataset_distance(shard, shard, labels="none", epsilon=1e14, compute=compute)
    return result.source.fingerprint, result.value


def test_shards_of_integers_take_the_type_that_holds_all_of_them() -> None:
    whole = otdd.LabeledSamples(INTEGERS, None, ())
    assert pool(2).run(of_integer_shards) == [(whole.fingerprint, 0.0)] * 2


def true_divergence(
    source: otdd.LabeledSamples, target: otdd.LabeledSamples, table: torch.Tensor
) -> float:
    # Both sides count classes as the table does.
    points = [(source.features, source.labels)]
    points.append((target.features, target.labels + source.class_total))
    costs = tuple(
        reference.dense_cost(points[i][0], points[j][0], 0.5, table / 2, points[i][1], points[j][1])
        for i, j in ((0, 1), (0, 0), (1, 1))
    )
    return reference.sinkhorn_divergence(costs, source.masses, target.masses, EPSILON)


def of_one() -> dict[str, Any]:
    compute = otdd.ComputeOptions("cpu", group="world")
    one, _ = datasets()
    shard = one.take(torch.arange(torch.distributed.get_rank(), len(one), 2))
    return summary(otdd.dataset_distance(shard, shard, compute=compute))


def test_a_dataset_is_at_distance_0_from_itself() -> None:
    found = pool(2).run(of_one)[0]
    assert (found["value"], found["bounds"]) == (0.0, (0.0, 0.0))


def late_on_one(slow: int) -> dict[str, Any]:
    """A solve with a limit of seconds, on ranks of which one's clock runs away."""
    clock = iter(range(0, 10**9, 10**4))
    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == slow:
            seconds = "otdd_flash.solver.solve.time.perf_counter"
            patched.setattr(seconds, lambda: float(next(clock)))
        return lead(limited)


def limited(ranks: Ranks) -> dict[str, Any]:
    solver, compute = otdd.Converged(1e-5, max_seconds=1e3), otdd.ComputeOptions("cpu", group=ranks)
    found = otdd.dataset_distance(*datasets(), epsilon=EPSILON, solver=solver, compute=compute)
    return summary(found)


@pytest.mark.slow
def test_the_clock_of_rank_0_decides() -> None:
    first, second = pool(2).run(late_on_one, 1)
    assert first["converged"]
    assert second["converged"]
    first, second = pool(2).run(late_on_one, 0)
    assert first["stopped_by"] == "max_seconds"
    assert second["stopped_by"] == "max_seconds"


# Plans of ranks and of one process end at other iterations: each is as near to the solution.
FINE = otdd.Converged(tolerance=2.5e-5)


def of_weighted() -> dict[str, Any]:
    """Shards whose weights are in one unit: one is a part of a whole, one of its own rows."""
    rank, shards = torch.distributed.get_rank(), []
    for place, side in enumerate(weighted_datasets()):
        rows = torch.arange(0, 9) if rank == 0 else torch.arange(9, len(side))
        part = side.take(rows)
        if place == 1:
            # Made anew: a part of a whole remembers the unit of its weights.
            given = part.features, part.labels, side.class_names
            part = otdd.LabeledSamples(*given, 1.0 + rows)
        shards.append(part.to("cpu"))
    compute = otdd.ComputeOptions("cpu", group="world")
    found = otdd.dataset_distance(*shards, epsilon=EPSILON, solver=FINE, compute=compute)
    return summary(found)


def weighted_datasets() -> list[otdd.LabeledSamples]:
    return [replace(side, weights=torch.arange(1.0, len(side) + 1)) for side in datasets()]


@pytest.mark.slow
def test_masses_of_shards_add_up() -> None:
    found = pool(2).run(of_weighted)[0]
    alone = otdd.dataset_distance(*weighted_datasets(), epsilon=EPSILON, solver=FINE, compute="cpu")
    assert found["value"] == pytest.approx(alone.value, rel=1e-6)
    assert torch.allclose(found["coupling"], alone.class_coupling(), atol=1e-5)


def refused(given: str) -> Any:
    """Shards or calls that ranks cannot agree on."""
    rank = torch.distributed.get_rank()
    one, other = datasets()
    compute = otdd.ComputeOptions("cpu", group="world")
    settings: dict[str, Any] = {}

    def weighted(side: otdd.LabeledSamples, weight: float) -> otdd.LabeledSamples:
        weights = torch.full((len(side),), weight, dtype=torch.float64)
        return replace(side, weights=weights)

    match given:
        case "names" if rank == 1:
            one = replace(one, class_names=("a", "b", "c", "e"))
        case "columns":
            names = ("x", "y", "z") if rank == 0 else ("x", "z", "y")
            one = replace(one, feature_names=names)
        case "columns of others":
            # Those of one rank alone count for the whole.
            one = replace(one, feature_names=("x", "y", "z") if rank == 1 else None)
            other = replace(other, feature_names=("x", "z", "y"))
        case "dimension" if rank == 1:
            one = replace(one, features=one.features[:, :2])
        case "labels" if rank == 1:
            one = otdd.LabeledSamples(one.features, None, ())
        case "epsilon":
            settings = {"epsilon": 0.1 + rank}
        case "weights" if rank == 1:
            one = weighted(one, 1.0)
        case "heavy" if rank == 1:
            one, other = (weighted(side, 1e300) for side in (one, other))
        case "massless":
            one = weighted(one, 0.0)
        case "type" if rank == 1:
            return otdd.dataset_distance(one, [["a"]] * 3, compute=compute)
        case "values" if rank == 1:
            return otdd.dataset_distance(one.features * torch.nan, other, compute=compute)
        case "tensors":
            return otdd.sinkhorn_divergence(
                one.features, other.features, epsilon=0.1, compute=compute
            )
    return otdd.dataset_distance(one, other, compute=compute, **settings)


REFUSALS = {
    "massless": "source: weights must not all be zero, as they are in all shards",
    "type": "rank 1: target: features must be real numbers, got list of 3 items",
    "names": "ranks disagree on class names of source",
    "columns": "ranks disagree on names of features of source",
    "columns of others": "the column 'y' is number 2 of samples and number 3 of samples",
    "dimension": "ranks disagree on the number of features of source",
    "labels": "ranks disagree on whether there are labels of source",
    "epsilon": "ranks disagree on settings",
    "weights": "ranks disagree on whether there are weights of source",
    "heavy": "rank 1: source: the weights of a shard add up to 1e+300 or beyond",
    "values": "rank 1: source: features hold 183 NaN",
    "tensors": "lead other work from rank 0 with otdd.led",
}


def test_bad_input_is_refused_on_every_rank() -> None:
    for given, said in REFUSALS.items():
        for answer in pool(2).run(refused, given):
            assert isinstance(answer, otdd.InputError), (given, answer)
            assert said in str(answer)


def test_groups_that_are_none_are_refused() -> None:
    with pytest.raises(otdd.InputError, match=r"init_process_group\(\) first"):
        otdd.dataset_distance(*datasets(), compute=otdd.ComputeOptions("cpu", group="world"))
    with pytest.raises(otdd.InputError, match="group of this process"):
        otdd.ComputeOptions(group=3)  # type: ignore[arg-type]
    with pytest.raises(otdd.InputError, match=r"device=cuda:1 names one card for all processes"):
        otdd.ComputeOptions("cuda:1", group="world")


def of_some() -> Any:
    """Shards of the last two of three processes; the first is in no such group."""
    group = torch.distributed.new_group([1, 2])
    rank = torch.distributed.get_rank()
    shards = [side.take(torch.arange(rank % 2, len(side), 2)) for side in datasets()]
    if rank == 0:
        return None
    compute = otdd.ComputeOptions("cpu", group=group)
    return summary(otdd.dataset_distance(*shards, epsilon=EPSILON, compute=compute))


@pytest.mark.slow
def test_a_group_of_some_processes() -> None:
    left_out, *members = pool(3).run(of_some)
    assert left_out is None
    alone = otdd.dataset_distance(*datasets(), epsilon=EPSILON, compute="cpu")
    for each in members:
        assert each["backend"].endswith("2 ranks")
        assert each["value"] == members[0]["value"] == pytest.approx(alone.value, rel=1e-3)
