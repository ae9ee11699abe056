"""Devices: what is there and what can run on it, and a clear error for what cannot."""

from __future__ import annotations

import sys

import pytest
import torch

from otdd_flash.devices import check_triton, moved, resolve_device, sent
from otdd_flash.errors import InputError
from tests.refusals import naming


def test_without_a_gpu_it_is_the_cpu_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("auto", "cpu", "cpu:0", torch.device("cpu")):
        assert resolve_device(name) == torch.device("cpu"), name
    for name in ("cuda", "cuda:3", "gpu", "", "meta"):
        with naming(name), pytest.raises(InputError, match="choose one of: auto, cpu"):
            resolve_device(name)


def test_cuda_devices_carry_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0)):
        assert resolve_device(name) == torch.device("cuda", index), name
    with pytest.raises(InputError, match=r"'cuda:2'.*cuda:0, cuda:1"):
        resolve_device("cuda:2")


OLD = "is too old for the Triton kernels: its compute capability is 7.5 and they need 8.0; use"
AMD = "is an AMD card, but the error model that the bounds of the Triton kernels rest on is of"


def test_triton_runs_on_nvidias_ampere_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    for capability, hip, sentence in (
        *((capability, None, None) for capability in ((8, 0), (9, 0), (12, 0))),
        ((7, 5), None, OLD),
        ((9, 4), "6.4.1", AMD),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, is_=capability: is_)
        monkeypatch.setattr(torch.version, "hip", hip)
        if sentence is None:
            check_triton(device)
            continue
        with pytest.raises(InputError) as refused:
            check_triton(device)
        assert str(refused.value).startswith(f"cuda:1 (Some GPU) {sentence}")
        assert str(refused.value).endswith("use backend=torch")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match=r"^cpu has no Triton: .*use backend=torch$"):
        check_triton(torch.device("cpu"))


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
    parts = torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.ones(2, 1)
    found = sent(torch.device(name), *parts)
    assert [part.shape for part in found] == [part.shape for part in parts]
    assert len({part.untyped_storage()._cdata for part in found}) == 1
    # As memory of their own.
    assert all(part.storage_offset() * part.itemsize % 16 == 0 for part in found)
    if name != "meta":
        assert all(torch.equal(one.cpu(), two) for one, two in zip(found, parts, strict=True))
