"""The dataset distance as a metric of torchmetrics.

`DatasetDistance` is public; nothing in this package imports it, as torchmetrics is an extra.
`compute` calls `otdd.dataset_distance`. The state is the rows and labels kept of all updates, up to
`max_rows` of a side, which torchmetrics gathers from all processes before `compute`, and the
epsilon, which the first `compute` fixes so that later values can be compared with its own. State
must consist of tensors or lists of tensors, which is all that torchmetrics gathers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from otdd_flash.arguments import count
from otdd_flash.checks import shown
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.otdd import dataset_distance
from otdd_flash.real_numbers import in_double, real_tensor
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.term import refuse_both


class DatasetDistance(Metric):  # type: ignore[misc]
    """The Optimal Transport Dataset Distance between two datasets, given in batches.

    `compute()` returns {"value", "lower", "upper"}, each a 0-dim float64 tensor. With several
    processes the rows are those of all of them, in their order. The value then equals, within the
    bounds of both, that of one process which kept all these rows.

    Args:
        max_rows: limit of rows kept of each side, in each process; later rows are left out, with a
            notice.
        labels: how classes are compared; must be "none" if `update` gets no labels.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at the first `compute`, which
            fixes `epsilon` for all later ones; instead of `epsilon`. Neither given means 0.01.
        options: further keywords of `dataset_distance`, such as {"solver": otdd.Converged(...)}.
        **kwargs: keywords of `torchmetrics.Metric`.

    Raises:
        InputError: `max_rows` is below 1, both epsilons are given, or `options` hold a penalty that
            is relative to the mean cost.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    source_rows: list[Tensor] | Tensor
    target_rows: list[Tensor] | Tensor
    source_labels: list[Tensor] | Tensor
    target_labels: list[Tensor] | Tensor
    fixed_epsilon: Tensor

    def __init__(
        self,
        *,
        max_rows: int = 10_000,
        labels: Any = "gaussian",
        epsilon: float | None = None,
        epsilon_relative: float | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_rows = count("max_rows", max_rows)
        self.settings = {
            **{"labels": labels, "epsilon": epsilon, "epsilon_relative": epsilon_relative},
            **(options or {}),
        }
        refuse_both(self.settings["epsilon"], self.settings["epsilon_relative"])
        if self.settings.get("unbalanced_relative") is not None:
            raise InputError(
                "unbalanced_relative is a multiple of the mean cost of the rows seen, and numbers "
                "at different penalties do not compare; give unbalanced, in units of the cost"
            )
        # The first `compute` fixes it, as numbers at different epsilons do not compare.
        self.epsilon = self.settings["epsilon"]
        self.add_state("fixed_epsilon", default=self._as_state(), dist_reduce_fx=_smallest)
        for side in ("source", "target"):
            for part in ("rows", "labels"):
                self.add_state(f"{side}_{part}", default=[], dist_reduce_fx="cat")

    def update(
        self,
        source: Tensor,
        target: Tensor,
        source_labels: Tensor | None = None,
        target_labels: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            source: (n, d) features of the source; n may be 0.
            target: (m, d) features of the target.
            source_labels: (n,) whole numbers, given always or never.
            target_labels: (m,) whole numbers, given always or never.

        Raises:
            InputError: shapes that do not fit, or labels given for some rows only.
        """
        self._check("source", source, source_labels)
        self._check("target", target, target_labels)
        if source.shape[1] != target.shape[1]:
            raise InputError(
                f"source has rows of {source.shape[1]} features and target of {target.shape[1]}; "
                "both sides need the same"
            )
        self._add("source", source, source_labels)
        self._add("target", target, target_labels)

    def compute(self) -> dict[str, Tensor]:
        """Compute the distance between all rows seen, with solver bounds.

        Raises:
            InputError: a side has no rows yet, or the distance cannot be computed.
        """
        settings, fixed = dict(self.settings), float(self.fixed_epsilon)
        if not math.isnan(fixed):
            # It is that of all processes, some of which may have computed on their own rows before.
            self.epsilon = fixed
        if self.epsilon is not None:
            settings |= {"epsilon": self.epsilon, "epsilon_relative": None}
        result = dataset_distance(self._samples("source"), self._samples("target"), **settings)
        self.epsilon = result.epsilon
        self.fixed_epsilon = self._as_state()
        lower, upper = result.bounds
        numbers = {"value": result.value, "lower": lower, "upper": upper}
        return {
            name: torch.tensor(number, dtype=torch.float64, device=self.device)
            for name, number in numbers.items()
        }

    def reset(self) -> None:
        """Forget all rows; the epsilon that the first `compute` fixed stays."""
        super().reset()
        self.fixed_epsilon = self._as_state()

    def _as_state(self) -> Tensor:
        """Return the epsilon as a tensor for other processes, () float64; NaN if there is none."""
        epsilon = math.nan if self.epsilon is None else self.epsilon
        return torch.tensor(epsilon, dtype=torch.float64)

    def _check(self, side: str, rows: Tensor, labels: Tensor | None) -> None:
        """Refuse rows that do not fit the earlier ones.

        Raises:
            InputError: as `update`.
        """
        for name, given in ((side, rows), (f"{side}_labels", labels)):
            if given is not None and not isinstance(given, Tensor):
                raise InputError(f"{name} must be a tensor, got {shown(given)}; torch.as_tensor()")
        if rows.ndim != 2:
            raise InputError(f"{side} must be (rows, features), got {tuple(rows.shape)}")
        if labels is not None and labels.shape != rows.shape[:1]:
            raise InputError(
                f"{side}_labels must be ({len(rows)},), one for each row, got {tuple(labels.shape)}"
            )
        seen, labelled = getattr(self, f"{side}_rows"), bool(getattr(self, f"{side}_labels"))
        if seen and labelled != (labels is not None):
            raise InputError(f"{side}_labels must be given with every update, or with none")
        for other in (*self.source_rows[:1], *self.target_rows[:1]):
            if other.shape[1] != rows.shape[1]:
                raise InputError(
                    f"{side} has rows of {rows.shape[1]} features, and rows of before have "
                    f"{other.shape[1]}; both sides need the same features in every update, and "
                    "reset() forgets the rows seen"
                )
            if other.device != rows.device:
                raise InputError(
                    f"{side} is on {rows.device}, and rows of before are on {other.device}; move "
                    "all to one device"
                )
        real_tensor(side, rows)

    def _add(self, side: str, rows: Tensor, labels: Tensor | None) -> None:
        kept, known = getattr(self, f"{side}_rows"), getattr(self, f"{side}_labels")
        room = self.max_rows - sum(map(len, kept))
        if len(rows) > room:
            warn(
                f"max_rows={self.max_rows} of the {side} are kept; {len(rows) - room} more are "
                "left out",
                DataNotice,
            )
        if min(len(rows), room) < 1:
            return
        # Rows are copied, as training loops write the next batch into the same memory.
        kept.append(rows[:room].detach().clone())
        if labels is not None:
            known.append(labels[:room].detach().to(rows.device, copy=True))

    def _samples(self, side: str) -> LabeledSamples:
        rows, labels = (
            _joined(side, getattr(self, f"{side}_rows")),
            _joined(side, getattr(self, f"{side}_labels")),
        )
        if rows is not None and labels is not None and len(rows) != len(labels):
            raise InputError(
                f"{len(labels)} of {len(rows)} rows of the {side} have labels; give them with all "
                "updates of all metrics that are merged, or with none"
            )
        if rows is None:
            raise InputError(f"no rows of the {side} yet: call update before compute")
        if labels is None:
            return LabeledSamples.of(rows, side)
        return LabeledSamples.from_arrays(rows, labels.cpu(), name=side)


def _smallest(epsilons: Tensor) -> Tensor:
    """Return the smallest of several states (k,) that are not NaN."""
    known = epsilons[~epsilons.isnan()]
    return known.min() if len(known) else epsilons[0]


def _joined(side: str, parts: list[Tensor] | Tensor) -> Tensor | None:
    """Join a state: a list before processes are gathered, a tensor afterwards."""
    if isinstance(parts, Tensor):
        return parts if len(parts) else None
    widths = sorted({part.shape[1:] for part in parts})
    if len(widths) > 1:
        raise InputError(
            f"metrics were merged whose rows of the {side} have {widths[0][0]} and {widths[1][0]} "
            "features; merge those of the same features"
        )
    if len({part.dtype for part in parts}) > 1:
        # torch would join integers and float32 as float32.
        parts = [in_double("what was seen", part) for part in parts]
    return torch.cat(parts) if parts else None
