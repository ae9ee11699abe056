"""The tensors of an order come as they were sent, in few broadcasts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import pool
from torch import Tensor
from torch.nn import Parameter

from otdd_flash.distributed import ranks as module
from otdd_flash.distributed.ranks import Dealt, Described, Ranks, messages, packed, unpacked
from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures, features_file

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


def summary_by_rank(ranks: Ranks, given: Any) -> list[Any]:
    """What every rank says of what an order gave it."""
    return ranks.all_gathered_objects(_summary(given))


def _summary(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _summary(value) for key, value in given.items()}
    numbers = given.resolve_conj().to_dense().tolist()
    return type(given), given.device.type, given.layout, given.requires_grad, numbers


def sent_within(ranks: Ranks, folder: str) -> tuple[list[Any], int]:
    matrix = np.arange(40_000, dtype=np.float32).reshape(-1, 4)
    np.save(f"{folder}/file.npy", matrix)
    weight = Parameter(torch.arange(3.0))
    objects = {
        "parameter": weight,
        "constant": Parameter(torch.ones(2), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "file": features_file(f"{folder}/file.npy"),
    }
    before = ranks.shared.bytes_moved
    found = ranks.order(summary_by_rank, objects)
    return found, ranks.shared.bytes_moved - before


def test_what_is_no_plain_tensor_comes_as_it_is(tmp_path: Path) -> None:
    found, moved = pool(3).led(sent_within, str(tmp_path))[0]
    assert found == [found[0]] * 3
    kinds = {key: value[0] for key, value in found[0].items()}
    assert kinds["parameter"] is kinds["constant"] is Parameter
    assert issubclass(kinds["file"], FileFeatures)
    # Of the file its name is sent, of a sparse tensor no zeros.
    assert moved < 20_000


def test_an_order_of_tensors_that_are_no_bytes_is_sent(tmp_path: Path) -> None:
    assert pool(2).led(sent_tops)[0] == [[[1 - 2j, -3j], [[0.0, 1.0], [0.0, 0.0]], [0.0, 1.0]]] * 2


def numbers_by_rank(ranks: Ranks, *given: Tensor) -> list[Any]:
    own = [each.resolve_conj().to_dense().tolist() for each in given]
    return ranks.all_gathered_objects(own)


def sent_tops(ranks: Ranks) -> list[Any]:
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    sparse = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()
    return ranks.order(numbers_by_rank, conjugate, sparse, torch.arange(2.0))


def refused(ranks: Ranks) -> tuple[list[str], bool, list[Any]]:
    """What a group of NCCL alone refuses, whether ranks are apart then, and what it takes."""
    # Gloo is given host memory, and each rank's own GPU what came from one.
    ranks._backends = {"cpu": "gloo"}
    assert ranks.moves(torch.device("cuda"))
    ranks._backends = {"cuda": "nccl"}
    said = []
    for argument in (torch.ones(2), Dealt(torch.ones(4)), Parameter(torch.ones(2))):
        with pytest.raises(InputError) as error:
            ranks.order(summary_by_rank, argument)
        said.append(str(error.value))
    apart = ranks.apart
    return said, apart, ranks.order(summary_by_rank, {"step": torch.ones(2)})


def test_arguments_that_the_group_does_not_move_are_refused_before_anything_is_sent() -> None:
    said, apart, found = pool(2).led(refused)[0]
    assert all("moves no tensors of device=cpu" in each for each in said)
    assert not apart
    # Such as an optimiser's count of steps, which is in host memory beside points on a GPU.
    assert found == [{"step": _summary(torch.ones(2))}] * 2


def no_memory(ranks: Ranks) -> list[Any]:
    meta = {"points": torch.empty(2, 3, device="meta")}
    return ranks.order(shapes_by_rank, meta)


def shapes_by_rank(ranks: Ranks, given: dict[str, Tensor]) -> list[Any]:
    each = given["points"]
    return ranks.all_gathered_objects((each.device.type, tuple(each.shape)))


def test_tensors_without_memory_are_pickled() -> None:
    assert pool(2).led(no_memory)[0] == [("meta", (2, 3))] * 2


def dealt_within(ranks: Ranks) -> None:
    ranks.order(summary_by_rank, {"rows": Dealt(torch.ones(4))})


def test_a_dealt_tensor_within_an_argument_is_refused() -> None:
    # In a group of one: a defect of rank 0 leaves others waiting.
    assert isinstance(pool(1).led(dealt_within)[0], AssertionError)


LARGE = 20_000_000


def measure(ranks: Ranks) -> None:
    tracemalloc.start()


def peaks(ranks: Ranks) -> list[float]:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return ranks.all_gathered_objects(peak / LARGE)


def nothing(ranks: Ranks, content: bytes) -> None:
    pass


def peaks_of_a_large_order(ranks: Ranks) -> list[float]:
    content = bytes(LARGE)
    ranks.order(measure)
    ranks.order(nothing, content)
    return ranks.order(peaks)


def test_a_large_order_is_held_twice_at_most() -> None:
    """Beside what the caller has; and on the others, what they make of it included."""
    assert max(pool(2).led(peaks_of_a_large_order)[0]) < 2.5
