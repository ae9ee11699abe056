"""Steps of a flow, taken by all processes that there are, each with its rows.

A rank is sent what its rows move by, and rank 0 gathers the rows where they are then. Where an
evaluation has had the points copied to every rank, all gather them, and the copies follow.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otdd_flash.distributed.copies import Copied
from otdd_flash.distributed.ranks import Dealt, Ranks
from otdd_flash.flows.divergence import Batch
from otdd_flash.flows.rows import Rows
from otdd_flash.flows.shard import VALUE, Parts, Shard
from otdd_flash.flows.stepping import Stepping, normal_like


class Stepper:
    """Moves the variables of a flow, in place.

    Args:
        variables: (n, ...) by name; the points under "points".
        stepping: how.
        total: steps of the whole flow, which some schedules end with.
        temperature: w of an entropy functional w * int rho log rho, 0 for none.
        before_box: told of the points that a step has led to, before the box takes them back.
        ranks: that own the rows, led by this process; None if it is alone.
    """

    def __init__(
        self,
        variables: Mapping[str, Tensor],
        stepping: Stepping,
        total: int,
        temperature: float,
        before_box: Callable[[Tensor], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._variables, self._stepping, self._total = dict(variables), stepping, total
        self._temperature, self._before_box, self._ranks = temperature, before_box, ranks
        counts = {name: len(tensor) for name, tensor in variables.items()}
        self._copied: Copied | None = None
        if ranks is None:
            self._own = Rows(None, stepping, variables, counts)
            return
        self._number = ranks.number()
        weakref.finalize(self, ranks.drop, self._number)
        self._copied = Copied(ranks, variables["points"], self)
        self._own = ranks.order(
            _own, self._number, stepping, counts, *self._of_own(*variables.values())
        )

    def step(
        self,
        velocities: Mapping[str, Tensor],
        step: int,
        draw: torch.Generator,
        batch: Batch | None = None,
    ) -> None:
        """Take step `step` along -velocities, spread the batch by entropy, return to the box."""
        size = self._stepping.step_size_at(step, self._total)
        points, noise, spread = self._variables["points"], None, 0.0
        if self._temperature > 0:
            spread = math.sqrt(2 * self._temperature * size)
            noise = normal_like(points, draw)
            noise = noise if batch is None else batch.only(noise)
            (noise,) = self._of_own(noise)
        against = (velocities[name].to(part) for name, part in self._variables.items())
        self._moved("step", size, spread, noise, *self._of_own(*against))
        if (box := self._stepping.box) is not None:
            if self._before_box is not None:
                self._before_box(points)
            self._clamp(*box)

    def undo(self) -> None:
        self._moved("undo")

    def others(self) -> dict[str, dict[str, Any]]:
        return self._own.others()

    def write(self, folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> list[Shard]:
        """Write a shard on every rank, these tensors into that of rank 0.

        Raises:
            InputError: one cannot be written.
        """
        self._own.beside = tensors
        try:
            found: list[Shard] = self._all("write", folder.resolve(), stem)
        finally:
            self._own.beside = {}
        return found

    def restore(self, rows: Parts, others: Mapping[str, Any]) -> None:
        """Go on from what was written: rows of all variables, and what `others` gave."""
        names = [(variable, key) for variable, held in rows.items() for key in held]
        tensors = (rows[variable][key].to(self._variables[variable]) for variable, key in names)
        self._all("restore", names, others, *self._of_own(*tensors))
        for variable, tensor in self._variables.items():
            tensor.copy_(rows[variable][VALUE])

    def _all(self, method: str, *arguments: Any) -> Any:
        """Have every rank call a method of its rows."""
        if self._ranks is None:
            return getattr(self._own, method)(*arguments)
        return self._ranks.order(_call, self._number, method, *arguments)

    def _moved(self, method: str, *arguments: Any) -> None:
        """Have every rank move its rows by a method, and take over where they are then."""
        if self._ranks is None:
            getattr(self._own, method)(*arguments)
            return
        with self._copies_follow() as copy:
            whole = self._ranks.order(_moved, self._number, copy, method, *arguments)
            for name, tensor in whole.items():
                self._variables[name].copy_(tensor)

    def _clamp(self, low: float, high: float) -> None:
        if self._ranks is None:
            self._own.clamp(low, high)
            return
        with self._copies_follow() as copy:
            self._ranks.order(_clamped, self._number, copy, low, high)
            self._variables["points"].clamp_(low, high)

    @contextmanager
    def _copies_follow(self) -> Iterator[int | None]:
        """Change the points, and their copies alike, by the number that is yielded if any."""
        assert self._copied is not None
        copy = self._copied.number
        yield copy
        if copy is not None:
            self._copied.mark_equal()

    def _of_own(self, *whole: Tensor) -> tuple[Any, ...]:
        """Tensors of all rows, as arguments of which every rank gets its own rows."""
        return whole if self._ranks is None else tuple(map(Dealt, whole))


def _own(
    ranks: Ranks, number: int, stepping: Stepping, counts: Mapping[str, int], *own: Tensor
) -> Rows:
    rows = Rows(ranks, stepping, dict(zip(counts, own, strict=True)), counts)
    ranks.held[number] = rows
    return rows


def _call(ranks: Ranks, number: int, method: str, *arguments: Any) -> Any:
    return getattr(ranks.held[number], method)(*arguments)


def _moved(
    ranks: Ranks, number: int, copy: int | None, method: str, *arguments: Any
) -> dict[str, Tensor]:
    """All rows after a method has moved them; a copy of the points follows."""
    rows: Rows = ranks.held[number]
    getattr(rows, method)(*arguments)
    whole = rows.whole()
    if copy is not None and ranks.rank > 0:
        ranks.held[copy].copy_(whole["points"])
    return whole


def _clamped(ranks: Ranks, number: int, copy: int | None, low: float, high: float) -> None:
    """Take points back into a box, and a copy of them all."""
    ranks.held[number].clamp(low, high)
    if copy is not None and ranks.rank > 0:
        ranks.held[copy].clamp_(low, high)
