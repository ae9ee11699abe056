"""Whom a flow tells on its way, and whom it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from otdd_flash import arguments
from otdd_flash.checks import check_fields
from otdd_flash.flows.history import StepRecord
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.solver.term.result import Progress


@dataclass(frozen=True)
class Callbacks:
    """Functions that a flow calls; None calls nobody.

    Args:
        progress: called with the record of every step, and of the end.
        solver_progress: called as solver_progress(term, iteration, marginal error).
        class_progress: called as class_progress(pairs of classes measured, their total).
        stop: asked before every step whether to end here.

    Raises:
        InputError: one of them cannot be called.
    """

    progress: Callable[[StepRecord], None] | None = None
    solver_progress: Progress | None = None
    class_progress: PairProgress | None = None
    stop: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        check_fields(self, arguments.CALLBACKS)
