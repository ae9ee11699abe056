"""The offline mode of libraries: without permission nothing is fetched.

`network` must be around every call of a library that could fetch models or data, because without
`download` nothing may leave this machine; `data.hugging_face`, `data.image_datasets`,
`extractors.sentence_embedding` and `extractors.vision_models` use it. `data.hugging_face` and both
modules of `extractors` put ALLOW into their messages. `data.dataset` and `data.hugging_face` use
`is_address`, and `data.dataset` recognises `RefusedAddress`. Attributes of libraries are replaced
for the time of the call and restored in any case, so that the user's own use of them is unchanged.
A library that copies HF_HUB_OFFLINE when it is imported (`datasets`) must be imported before
`network` is entered, else it stays offline afterwards.
"""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# The way out in messages.
ALLOW = "download=true allows fetching"
# The file systems of fsspec that stay on this machine.
LOCAL = ("file", "local", "memory", "zip", "tar", "gzip", "bz2", "xz", "lz4", "zstd", "dir", "data")


class RefusedAddress(OSError):
    """An address was to be opened although nothing may be fetched."""


def is_address(path: str) -> bool:
    """Return whether a path has a protocol, such as https:// or s3://, or several, joined by ::."""
    return "://" in path or "::" in path


@contextmanager
def network(*, allowed: bool) -> Iterator[None]:
    """Let libraries of models and data fetch, or restrict them to files on this machine.

    The Hugging Face libraries have an offline mode. torchvision and timm load weights through
    torch.hub, which looks for a file first; without permission its `urlopen` is replaced. Addresses
    inside files are opened through fsspec, which is restricted to local file systems.
    """
    if allowed:
        yield
        return
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in _closed_doors()]
    for owner, name, closed in _closed_doors():
        setattr(owner, name, closed)
    try:
        yield
    finally:
        for owner, name, before in replaced:
            setattr(owner, name, before)


def _closed_doors() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) for every way to the network."""
    import huggingface_hub.constants
    import torch.hub

    doors = [
        (huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        (torch.hub, "urlopen", _refuse),
        (urllib.request, "urlopen", _refuse),
    ]
    if (datasets := sys.modules.get("datasets")) is not None:
        # The library keeps a copy of the switch.
        doors.append((datasets.config, "HF_HUB_OFFLINE", True))
    # Modules of fsspec keep a copy of the function.
    for module in ("fsspec", "fsspec.core", "fsspec.registry", "fsspec.generic"):
        if (owner := sys.modules.get(module)) is not None:
            door = "get_filesystem_class"
            doors.append((owner, door, _local_only(getattr(owner, door))))
    return doors


def _local_only(inner: Callable[[str], Any]) -> Callable[[str], Any]:
    def find(protocol: str) -> Any:
        if protocol and protocol not in LOCAL:
            # An address that was joined to a folder has the protocol "folder/https".
            name = protocol.rpartition("/")[2]
            raise RefusedAddress(f"it names an address of {name}://; {ALLOW}")
        return inner(protocol)

    return find


def _refuse(request: Any, *args: Any, **kwargs: Any) -> NoReturn:
    # Without ALLOW: callers add the way out to their messages.
    address = getattr(request, "full_url", request)
    raise OSError(f"it is not on this machine, and {address} may not be opened")
