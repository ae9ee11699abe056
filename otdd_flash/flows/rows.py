"""The rows of a flow's variables that one process owns, and moves.

Optimisers of `Stepping` move every number by its own gradients alone, so that rows can be moved
apart: rank r has rows `share(n)` of a variable of n rows, and what the optimiser remembers of them.
One process alone has all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.flows.shard import VALUE, Shard, write_shard
from otdd_flash.flows.stepping import Stepping


class Rows:
    """Rows of variables, with an optimiser.

    Args:
        ranks: of which this process is one; None if it is alone.
        stepping: how they move.
        own: by name, the rows of every variable that this process owns; they are moved in place.
        counts: of all rows, by name.

    Attributes:
        beside: what `write` writes beside the rows, by name.
    """

    def __init__(
        self,
        ranks: Ranks | None,
        stepping: Stepping,
        own: Mapping[str, Tensor],
        counts: Mapping[str, int],
    ) -> None:
        self._ranks, self._counts = ranks, dict(counts)
        self._parameters = {
            name: torch.nn.Parameter(rows, requires_grad=False) for name, rows in own.items()
        }
        self._optimizer = stepping.build([*self._parameters.values()])
        self._good: Any = None
        self.beside: Mapping[str, Tensor] = {}

    def step(self, size: float, spread: float, noise: Tensor | None, *against: Tensor) -> None:
        """Move against velocities, and remember where the rows were.

        Args:
            size: time tau of the step.
            spread: multiple of the noise that is added to the points.
            noise: of the own points, or None.
            *against: velocities of the own rows of every variable.
        """
        self._good = copied(self._state(), self._good)
        for group in self._optimizer.param_groups:
            group["lr"] = size
        for parameter, velocity in zip(self._parameters.values(), against, strict=True):
            parameter.grad = velocity
        self._optimizer.step()
        self._optimizer.zero_grad()
        if noise is not None:
            self._parameters["points"].data.add_(noise, alpha=spread)

    def clamp(self, low: float, high: float) -> None:
        self._parameters["points"].data.clamp_(low, high)

    def undo(self) -> None:
        for parameter in self._parameters.values():
            if parameter.is_cuda:
                # What was copied has arrived.
                torch.cuda.current_stream(parameter.device).synchronize()
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._good["variables"][name])
        self._optimizer.load_state_dict(self._good["optimizer"])

    def whole(self) -> dict[str, Tensor]:
        """All rows of every variable, gathered by all ranks together."""
        ranks = self._ranks
        assert ranks is not None
        return {
            name: ranks.gathered(parameter.data, self._counts[name])
            for name, parameter in self._parameters.items()
        }

    def write(self, folder: Path, stem: str) -> list[Shard]:
        """Write a shard on every rank; return what there is to say of all of them.

        Raises:
            InputError: one cannot be written.
        """
        ranks = self._ranks
        name = f"{stem}.rank-{0 if ranks is None else ranks.rank}"
        shares = {variable: self._share(variable) for variable in self._parameters}

        def own() -> Shard:
            return write_shard(folder, name, self.beside, shares, self._kept(of_rows=True))

        return [own()] if ranks is None else ranks.all_gathered_objects(ranks.together(own))

    def restore(
        self, names: Sequence[tuple[str, str]], others: Mapping[str, Any], *tensors: Tensor
    ) -> None:
        """Go on from what was written.

        Args:
            names: of what is kept of rows: the variable, and what of it.
            others: what the optimiser keeps of no row, by variable.
            *tensors: the own rows of each of `names`.
        """
        kept = {name: dict(others.get(name, {})) for name in self._parameters}
        for (variable, key), tensor in zip(names, tensors, strict=True):
            if key == VALUE:
                self._parameters[variable].data.copy_(tensor)
            else:
                kept[variable][key] = tensor.clone()
        state = {place: held for place, held in enumerate(kept.values()) if held}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        # That has given numbers, such as NAdam's product, the type of the rows.
        for name, parameter in self._parameters.items():
            held = self._optimizer.state[parameter]
            held |= {
                key: held[key].to(part.dtype)
                for key, part in others.get(name, {}).items()
                if isinstance(part, Tensor)
            }

    def others(self) -> dict[str, dict[str, Any]]:
        """What the optimiser keeps that is of no row, such as its count of steps, by variable."""
        return self._kept(of_rows=False)

    def _kept(self, *, of_rows: bool) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            held = {VALUE: parameter.data, **self._optimizer.state.get(parameter, {})}
            found[name] = {
                key: part
                for key, part in held.items()
                if of_rows == (isinstance(part, Tensor) and part.shape == parameter.shape)
            }
        return found

    def _state(self) -> dict[str, Any]:
        variables = {name: parameter.data for name, parameter in self._parameters.items()}
        return {"variables": variables, "optimizer": self._optimizer.state_dict()}

    def _share(self, name: str) -> slice:
        count = self._counts[name]
        return slice(0, count) if self._ranks is None else self._ranks.share(count)


def copied(state: Any, into: Any = None) -> Any:
    """A nest of containers with CPU copies of its tensors, which arrive in the order of the stream.

    Args:
        state: the nest.
        into: an earlier copy, whose memory is used again where it fits: memory that a GPU can
            write to at full speed takes long to get.
    """
    match state:
        case Tensor():
            fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (
                state.shape,
                state.dtype,
            )
            if not fits:
                into = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            # The step that follows waits for it on the device, where the host need not.
            return into.copy_(state.detach(), non_blocking=True)
        case dict():
            known = into if isinstance(into, dict) else {}
            return {key: copied(part, known.get(key)) for key, part in state.items()}
    return state
