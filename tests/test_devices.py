"""Device names: what is there, and a clear error for what is not."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError


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
@pytest.mark.parametrize("name", ["auto", "cpu", "cpu:0", torch.device("cpu")])
def test_without_a_gpu_it_is_the_cpu(name: str | torch.device) -> None:
    assert resolve_device(name) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("name", "index"), [("auto", 1), ("cuda", 1), ("cuda:0", 0)])
def test_cuda_devices_carry_their_index(name: str, index: int) -> None:
    assert resolve_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:3", "gpu", "", "meta"])
def test_absent_device_lists_those_that_are_there(name: str) -> None:
    with pytest.raises(InputError, match=r"choose one of: auto, cpu"):
        resolve_device(name)


@pytest.mark.usefixtures("two_gpus")
def test_index_beyond_the_last_gpu_lists_them() -> None:
    with pytest.raises(InputError, match=r"'cuda:2'.*cuda:0, cuda:1"):
        resolve_device("cuda:2")
