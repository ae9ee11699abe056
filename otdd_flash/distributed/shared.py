"""How work was shared by processes, for results to say.

`exchange` makes a `Shared`; `otdd` and `result` store it in results.
"""

from __future__ import annotations

from typing import NamedTuple


class Shared(NamedTuple):
    """How work was shared.

    Attributes:
        ranks: by how many processes.
        bytes_moved: what rank 0 sent, once however many received it, and received.
        layout: `replicated`, if every process held all points; `ring`, if for some cost each held
            its own, and those of the other side went round; `streamed`, if each read what it needed
            from files.
    """

    ranks: int
    bytes_moved: int
    layout: str = "replicated"


ALONE = Shared(1, 0)
