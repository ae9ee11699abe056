"""Devices: what is there and what can run on it, and a clear error for what cannot."""

from __future__ import annotations

import sys

import pytest
import torch

from otdd_flash.devices import check_one_device, check_triton, moved, resolve_device, sent
from otdd_flash.errors import InputError
from tests.refusals import naming


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_is_the_cpu_or_none() -> None:
    for name in ("auto", "cpu", "cpu:0", torch.device("cpu")):
        assert resolve_device(name) == torch.device("cpu"), name
    for name in ("cuda", "cuda:3", "gpu", "", "meta"):
        with naming(name), pytest.raises(InputError, match="choose one of: auto, cpu"):
            resolve_device(name)


@pytest.mark.usefixtures("two_gpus")
def test_cuda_devices_carry_their_index() -> None:
    for name, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0)):
        assert resolve_device(name) == torch.device("cuda", index), name
    with pytest.raises(InputError, match=r"'cuda:2'.*cuda:0, cuda:1"):
        resolve_device("cuda:2")


def gpu_of(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    return torch.device("cuda", 1)


def test_triton_runs_on_ampere_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        check_triton(gpu_of(capability, monkeypatch))
    for capability in ((7, 5), (6, 1)):
        with pytest.raises(InputError) as refused:
            check_triton(gpu_of(capability, monkeypatch))
        assert str(refused.value) == (
            "cuda:1 (Some GPU) is too old for the Triton kernels: its compute capability is "
            f"{capability[0]}.{capability[1]} and they need 8.0; use backend=torch"
        )


def test_amd_cards_are_refused_whatever_capability_they_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    for capability in ((9, 0), (9, 4), (11, 0)):
        with pytest.raises(InputError) as refused:
            check_triton(gpu_of(capability, monkeypatch))
        assert str(refused.value) == (
            "cuda:1 (Some GPU) is an AMD card, but the error model that the bounds of the Triton "
            "kernels rest on is of NVIDIA cards; use backend=torch"
        )
    check_triton(torch.device("cpu"))


def test_a_machine_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    pattern = r"^cuda:1 \(Some GPU\) has no Triton: .*triton.*; .*use backend=torch$"
    with pytest.raises(InputError, match=pattern):
        check_triton(gpu_of((9, 0), monkeypatch))
    with pytest.raises(InputError, match=r"^cpu has no Triton: .*use backend=torch$"):
        check_triton(torch.device("cpu"))


def test_two_devices_are_named() -> None:
    check_one_device(torch.device("cuda:1"), torch.device("cuda", 1))
    with pytest.raises(
        InputError, match=r"source is on cpu and target on cuda:1; move both .*\.to\(\)"
    ):
        check_one_device(torch.device("cpu"), torch.device("cuda:1"))


def test_what_is_there_already_is_not_copied() -> None:
    there = torch.zeros(3)
    assert moved(there, torch.device("cpu")) is there


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_comes_from_a_gpu_is_what_was_there(device: str) -> None:
    given = torch.randn(40, 30, device="cuda:0", requires_grad=True)
    for there in (given, given.T, given[::3, 1::2], given[:0]):
        found = moved(there, torch.device(device))
        assert found.device == torch.device(device)
        assert torch.equal(found, there.to(device))
    (found,) = torch.autograd.grad(moved(given[1:], torch.device(device)).sum(), given)
    assert torch.equal(found.cpu(), torch.cat((torch.zeros(1, 30), torch.ones(39, 30))))


@pytest.mark.parametrize("name", ["meta", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_numbers_of_the_host_are_sent_together(name: str) -> None:
    device = torch.device(name)
    parts = torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.ones(2, 1)
    there = torch.zeros(4, device=device)
    *found, same = sent(device, *parts, there)
    assert same is there
    assert [part.shape for part in found] == [part.shape for part in parts]
    assert {part.device for part in found} == {device}
    assert len({part.untyped_storage()._cdata for part in found}) == 1
    # As memory of their own.
    assert all(part.storage_offset() * part.itemsize % 16 == 0 for part in found)
    if name != "meta":
        assert all(torch.equal(one.cpu(), two) for one, two in zip(found, parts, strict=True))
    # Where they are already nothing moves.
    assert sent(torch.device("cpu"), *parts) == parts
