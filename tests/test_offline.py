"""Without download=true nothing opens a connection, and what is on this machine is found."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError


class Connected(BaseException):
    """A connection was tried; no handler of errors takes it for one of its own."""


PROTOCOLS = ("http", "https", "hf", "s3", "gs", "ftp")


@pytest.fixture(autouse=True)
def alarmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Connections fail loudly, and all caches are empty."""
    import datasets
    import fsspec
    from fsspec.registry import _registry

    def refuse(*_: Any, **__: Any) -> None:
        raise Connected

    class RemoteFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
        """Stands for the file systems of fsspec that are not on this machine."""

        cachable = False
        __init__ = refuse

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for protocol in PROTOCOLS:
        monkeypatch.setitem(_registry, protocol, RemoteFiles)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


FETCHED: list[Callable[..., Any]] = [
    lambda **more: otdd.extractors.timm("test_resnet", pretrained=True, **more),
    lambda **more: otdd.extractors.torchvision("squeezenet1_1", weights="DEFAULT", **more),
    lambda **more: otdd.load("huggingface", path="owner/name", **more),
    lambda **more: otdd.load("torchvision", dataset="CIFAR10", root="nowhere", **more),
    # By the common option alone.
    lambda **more: otdd.load(
        "torchvision", dataset="CIFAR10", root="nowhere", arguments={"download": True}, **more
    ),
]


@pytest.mark.parametrize("build", FETCHED)
def test_nothing_is_fetched_unless_asked_for(build: Any) -> None:
    with pytest.raises(InputError, match="download=true"):
        build()


@pytest.mark.parametrize("build", FETCHED[:2])
def test_what_is_asked_for_is_fetched(build: Any) -> None:
    """The alarm rings: the test above would hear a connection."""
    with pytest.raises(Connected):
        build(download=True)


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


IMAGE = {"_type": "Image"}


def _saved(folder: Path, path: str, feature: dict[str, Any]) -> dict[str, Any]:
    """What `save_to_disk` leaves, of an image or a list with one image that has only a path."""
    import datasets

    one: Any = {"bytes": None, "path": path}
    stored: Any = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    if "feature" in feature:
        one, stored = [one], datasets.List(stored)
    types = {"text": datasets.Value("string"), "image": stored, "label": datasets.Value("int64")}
    columns = {"text": ["u", "v"], "image": [one, one], "label": [0, 1]}
    datasets.Dataset.from_dict(columns, features=datasets.Features(types)).save_to_disk(folder)
    information = folder / "dataset_info.json"
    content = json.loads(information.read_text())
    content["features"]["image"] = feature
    information.write_text(json.dumps(content))
    return {"path": str(folder)}


def _with_readme(folder: Path, lines: str, rows: str = "u,0") -> dict[str, Any]:
    (folder / "README.md").write_text(f"---\n{lines}\n---\n")
    (folder / "a.csv").write_text(f"text,label\n{rows}\nv,1\n")
    return {"path": str(folder)}


def _configuration(value: str) -> str:
    return f"configs:\n- config_name: default\n  data_files: {value}"


CAST = """dataset_info:
  features:
  - name: text
    dtype: image
  - name: label
    dtype: int64"""
A = "https://example.com/a"
ADDRESSES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{f"row {protocol}": lambda f, p=protocol: _saved(f, f"{p}://h/a.png", IMAGE)
       for protocol in PROTOCOLS},
    "row, in an archive": lambda f: _saved(f, f"zip://a.png::{A}.zip", IMAGE),
    "row of csv": lambda f: _with_readme(f, CAST, f"{A}.png,0"),
    **{f"readme {protocol}": lambda f, p=protocol: _with_readme(f, _configuration(f"{p}://h/a.csv"))
       for protocol in PROTOCOLS},
    "readme, in an archive": lambda f: _with_readme(f, _configuration(f"zip://a.csv::{A}.zip")),
    "readme, another split": lambda f: _with_readme(
        f, _configuration(f"\n  - split: a\n    path: a.csv\n  - split: b\n    path: {A}.csv")
    ),
    "path of a file": lambda f: {"path": f"{A}.csv"},
    "path of a bucket": lambda f: {"path": "s3://bucket/a"},
    "path on the hub": lambda f: {"path": "hf://datasets/owner/name/a.parquet"},
}  # fmt: skip


def _read(folder: Path, case: str, **options: Any) -> list[Any]:
    folder.mkdir()
    return list(otdd.load("huggingface", **ADDRESSES[case](folder), **options).inputs)


@pytest.mark.slow(after=4)
@pytest.mark.parametrize("case", ADDRESSES)
def test_no_address_in_data_is_opened_unless_asked_for(tmp_path: Path, case: str) -> None:
    where = "row 0 of .* is the address" if case.startswith("row") else "address"
    with pytest.raises(InputError, match=f"{where}.*download=true"):
        _read(tmp_path / "data", case)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("role", ["label", "weights"])
def test_what_is_no_label_or_mass_is_not_fetched_to_find_out(tmp_path: Path, role: str) -> None:
    columns = {"input": "text", "label": "label", role: "image"}
    for place, feature in enumerate((IMAGE, {"_type": "List", "feature": IMAGE})):
        data = _saved(tmp_path / f"{place}", f"{A}.png", feature)
        with pytest.raises(InputError):
            otdd.load("huggingface", **data, **columns)


def test_other_readers_take_no_address() -> None:
    for name, option in (("arrays", "path"), ("idx", "images"), ("image_folder", "path")):
        with pytest.raises(InputError, match=r"https://example\.com/a is an address; fetch it"):
            otdd.load(name, **{option: A})
