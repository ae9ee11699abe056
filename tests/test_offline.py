"""Without download=true nothing opens a connection, and what is on this machine is found."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.offline import network


class Connected(BaseException):
    """A connection was tried; no handler of errors takes it for one of its own."""


@pytest.fixture(autouse=True)
def alarmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Connections fail loudly, and all caches are empty."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Connected

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    "build",
    [
        lambda: otdd.extractors.timm("test_resnet", pretrained=True),
        lambda: otdd.extractors.timm("hf-hub:timm/test_resnet.r160_in1k"),
        lambda: otdd.extractors.torchvision("squeezenet1_1", weights="DEFAULT"),
        lambda: otdd.load("huggingface", path="owner/name"),
        lambda: otdd.load("torchvision", dataset="KMNIST", root="nowhere"),
    ],
    ids=["timm", "timm hub", "torchvision", "datasets", "torchvision dataset"],
)
def test_nothing_is_fetched_unless_asked_for(build: Any) -> None:
    with pytest.raises(InputError, match="download=true"):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: otdd.extractors.timm("test_resnet", pretrained=True, download=True),
        lambda: otdd.extractors.torchvision("squeezenet1_1", weights="DEFAULT", download=True),
    ],
    ids=["timm", "torchvision"],
)
def test_what_is_asked_for_is_fetched(build: Any) -> None:
    """The alarm rings: the tests above would hear a connection."""
    with pytest.raises(Connected):
        build()


def test_torchvision_weights_that_are_there_are_found(tmp_path: Path) -> None:
    from torchvision import models

    network = models.squeezenet1_1()
    address = models.SqueezeNet1_1_Weights.DEFAULT.url
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(network.state_dict(), folder / Path(address).name)
    found = otdd.extractors.torchvision("squeezenet1_1", weights="DEFAULT").module
    name, expected = next(iter(network.state_dict().items()))
    assert torch.equal(found.state_dict()[name], expected)


def test_timm_weights_in_the_hubs_cache_are_found(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    network = timm.create_model("test_resnet")
    owner, _, name = network.pretrained_cfg["hf_hub_id"].partition("/")
    repository = tmp_path / "hub" / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / "0" / "model.safetensors"
    for folder in (snapshot.parent, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    save_file(network.state_dict(), snapshot)
    found = otdd.extractors.timm("test_resnet", pretrained=True).module.state_dict()
    assert all(torch.equal(found[key], network.state_dict()[key]) for key in found)


def test_doors_are_open_again_afterwards() -> None:
    import huggingface_hub.constants
    import torch.hub

    before = torch.hub.urlopen, huggingface_hub.constants.HF_HUB_OFFLINE
    with network(allowed=False):
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        with pytest.raises(OSError, match="https://there may not be opened"):
            torch.hub.urlopen("https://there")
    with network(allowed=True):
        assert torch.hub.urlopen is urllib.request.urlopen
    assert (torch.hub.urlopen, huggingface_hub.constants.HF_HUB_OFFLINE) == before


def test_untrained_networks_need_no_network() -> None:
    with pytest.warns(DataNotice, match="random weights"):
        otdd.extractors.timm("test_resnet")
