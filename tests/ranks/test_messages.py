"""The tensors of an order come as they were sent, in few broadcasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import pool
from torch import Tensor

from otdd_flash.distributed import ranks as module
from otdd_flash.distributed.ranks import Dealt, Described, Ranks, messages, packed, unpacked

pytestmark = pytest.mark.xdist_group("ranks")

SOME = [
    torch.arange(5.0),
    torch.tensor(0.25, dtype=torch.float64),
    torch.zeros(0, 3),
    torch.tensor([True, False, True]),
    torch.arange(12).reshape(3, 4).T,
    torch.arange(6.0).to(torch.float16).reshape(2, 3),
    torch.arange(2.0, requires_grad=True),
]


def test_tensors_of_all_types_come_back_aligned_and_independent() -> None:
    described = [Described.of(each) for each in SOME]
    (places,) = messages(described)
    assert places == [place for place, each in enumerate(SOME) if each.numel()]
    found = unpacked(packed([SOME[p] for p in places]), [described[p] for p in places])
    for each, place in zip(found, places, strict=True):
        assert torch.equal(each, SOME[place])
        assert each.dtype == SOME[place].dtype
        assert each.is_contiguous()
        assert (each.data_ptr() - found[0].data_ptr()) % module.ALIGNED == 0
    # Caches go by the count of changes, of which one tensor's are none of another's.
    before = found[1]._version
    found[0].zero_()
    assert found[1]._version == before
    assert torch.equal(found[1], SOME[1])


def test_large_tensors_are_sent_as_they_are() -> None:
    large = Described(torch.Size([module.SMALL]), torch.float32, torch.device("cpu"))
    small = Described.of(SOME[0])
    assert messages([small, large, small]) == [[1], [0, 2]]
    assert packed([SOME[0]]) is SOME[0]


def kept(ranks: Ranks, nested: dict[str, Tensor], *arguments: Any) -> None:
    ranks.held[0] = *arguments, nested["there"]


def what_is_kept(ranks: Ranks, folder: str) -> None:
    # Memory that tensors of several types share is not saved.
    own = [each.clone() if isinstance(each, Tensor) else each for each in ranks.held[0]]
    torch.save(own, f"{folder}/{ranks.rank}.pt")


def sent(ranks: Ranks, folder: str) -> tuple[int, int]:
    """How many broadcasts of tensors an order took, and its bytes."""
    count, broadcast = 0, torch.distributed.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(tensor, *args, **kwargs)

    twice, before = SOME[0], ranks.shared.bytes_moved
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "broadcast", counted)
        nested = {"there": SOME[4]}
        ranks.order(kept, nested, *SOME, "text", twice, None, Dealt(torch.arange(7.0)))
        moved = ranks.shared.bytes_moved - before
    ranks.order(what_is_kept, folder)
    return count, moved


def test_an_order_takes_one_broadcast_beside_its_own(tmp_path: Any) -> None:
    count, moved = pool(3).led(sent, str(tmp_path))[0]
    assert count == 2
    assert moved > sum(each.nbytes for each in SOME)
    for rank in range(3):
        *found, text, again, nothing, dealt, nested = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, SOME, strict=True))
        assert [each.shape for each in found] == [each.shape for each in SOME]
        assert (text, nothing) == ("text", None)
        assert torch.equal(again, SOME[0])
        assert torch.equal(nested, SOME[4])
        assert torch.equal(dealt, torch.arange(7.0)[rank * 7 // 3 : (rank + 1) * 7 // 3])
