"""Certificates are of the potentials of rank 0 on every rank; ranks without mass hold up nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import lead, pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import LostRankError
from otdd_flash.operators import parts, sharing
from otdd_flash.operators.parts import checksum

pytestmark = pytest.mark.xdist_group("ranks")

COUNT = 12


def sides(weights: Tensor | None = None) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw, labels = torch.Generator().manual_seed(2), torch.arange(COUNT) % 2
    source, target = (
        otdd.LabeledSamples(torch.randn(COUNT, 3, generator=draw) + k, labels, ("a", "b"), weights)
        for k in range(2)
    )
    return source, target


def solved(ranks: Ranks | None, backend: Any = "torch", weights: Tensor | None = None) -> Any:
    """Value, bounds and potentials."""
    compute = otdd.ComputeOptions("cpu", backend, group=ranks)
    result = otdd.dataset_distance(*sides(weights), epsilon=0.5, compute=compute)
    return result.value, result.bounds, [each.tolist() for each in result.potentials]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checksum_tells_of_every_bit(dtype: torch.dtype) -> None:
    potential = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits, whole = 8 * dtype.itemsize, checksum(potential)
    assert checksum(potential.clone()) == whole
    for place in range(len(potential)):
        for bit in range(bits):
            other = potential.clone()
            flip(other, place, bit)
            assert checksum(other) != whole
    assert checksum(potential.flip(0)) != whole
    for bit in range(bits):
        # High bits that change together do not cancel.
        pair = potential.clone()
        flip(pair, 1, bit)
        flip(pair, 3, bit)
        assert checksum(pair) != whole
    assert checksum(-potential[:4]) != checksum(potential[:4])


def flip(potential: Tensor, place: int, bit: int) -> None:
    kind = torch.int64 if potential.dtype == torch.float64 else torch.int32
    highest = bit == 8 * potential.dtype.itemsize - 1
    potential.view(kind)[place] ^= torch.iinfo(kind).min if highest else 1 << bit


def with_flips(name: str, times: int) -> tuple[Any, int]:
    """The distance where rank 1 gets a wrong bit in so many certificates, and their number."""
    marginals, calls = getattr(parts, name), 0

    def flipped(ranks: Ranks, number: int, f: Tensor, *others: Any) -> Any:
        nonlocal calls
        calls += 1
        if ranks.rank == 1 and calls <= times:
            f = f.clone()
            flip(f, 3, 0)
        return marginals(ranks, number, f, *others)

    flipped.__module__, flipped.__qualname__ = parts.__name__, name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, name, flipped)
        return lead(solved), calls


@pytest.mark.parametrize("name", ["marginals", "marginals_self"])
def test_a_flipped_bit_is_found_and_mended_before_a_certificate(name: str) -> None:
    right, calls = pool(2).run(with_flips, name, 0)[0]
    assert calls > 0
    assert pool(2).run(with_flips, name, 1)[0] == (right, calls)


def always_flipped() -> str:
    """What is raised where rank 1 gets a wrong bit however often it is sent."""
    check = checksum

    def other(potential: Tensor) -> Tensor:
        return check(potential) + torch.distributed.get_rank()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, "checksum", other)
        try:
            lead(solved)
        except LostRankError as error:
            return str(error)
    return ""


def test_bits_that_stay_wrong_certify_nothing() -> None:
    said = pool(2).run(always_flipped)
    assert all("other potentials than rank 0" in each for each in said)


def in_a_ring(ranks: Ranks, weights: Tensor) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "_in_a_ring", lambda *_: True)
        return solved(ranks, weights=weights)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("layout", ["torch", "ring", "triton"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_without_mass_holds_up_nobody(rank: int, layout: str) -> None:
    """All points of one rank, in the order of their classes, weigh nothing."""
    weights, share = torch.ones(COUNT, dtype=torch.float64), COUNT // 3
    order = (torch.arange(COUNT) % 2).sort(stable=True).indices
    weights[order[rank * share : (rank + 1) * share]] = 0
    arguments = (in_a_ring, weights) if layout == "ring" else (solved, layout, weights)
    value, (lower, upper), _ = pool(3).led(*arguments)[0]
    alone, (least, most), _ = solved(None, "torch", weights)
    assert value == pytest.approx(alone, rel=1e-4)
    assert max(lower, least) <= min(upper, most)
