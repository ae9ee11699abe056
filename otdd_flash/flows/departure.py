"""Both sides of a flow on the CPU, for its result, copied from a GPU while that takes the steps.

New memory takes longer to get than to fill, so what the end needs is got here too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.samples import LabeledSamples


class OnHost(NamedTuple):
    """What a result needs on the CPU.

    Attributes:
        points: the particles as they begin.
        goal: what they move towards.
        room: (n, p) for the particles as they end; None where they are on the CPU.
    """

    points: LabeledSamples
    goal: LabeledSamples
    room: Tensor | None


def ready(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work issued to a GPU so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def on_host(points: LabeledSamples, goal: LabeledSamples, begin: torch.cuda.Event | None) -> OnHost:
    """Copy both sides to the CPU, in a thread of its own beside the steps.

    Args:
        points: the particles as they begin, which no step changes.
        goal: what they move towards.
        begin: of `ready`, when both were there.
    """
    if begin is None:
        return OnHost(points.to("cpu"), goal.to("cpu"), None)
    stream = torch.cuda.Stream(points.features.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(begin)
        began, aim = points.to("cpu"), goal.to("cpu")
    # Copied, as what is only allocated is got when it is written to.
    return OnHost(began, aim, began.features.detach().clone())
