"""Nothing leaves this machine unless it was asked to: libraries are kept to what they cached."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# What messages say of the way out.
ALLOW = "download=true allows fetching"


@contextmanager
def network(*, allowed: bool) -> Iterator[None]:
    """Let libraries of models and data fetch, or keep them to what is on this machine.

    The Hugging Face libraries have an offline mode. torchvision and timm load weights through
    torch.hub, which looks for the file first and is left without its door to the network.
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
    """What to put in the place of which attribute."""
    import huggingface_hub.constants
    import torch.hub

    doors = [(huggingface_hub.constants, "HF_HUB_OFFLINE", True), (torch.hub, "urlopen", _refuse)]
    if (datasets := sys.modules.get("datasets")) is not None:
        # It keeps a copy of the switch.
        doors.append((datasets.config, "HF_HUB_OFFLINE", True))
    return doors


def _refuse(request: Any, *args: Any, **kwargs: Any) -> NoReturn:
    address = getattr(request, "full_url", request)
    raise OSError(f"it is not on this machine, and {address} may not be opened")
