"""The tasks' datasets, checked, moved and seen by the ground cost once for every process."""

from __future__ import annotations

from otdd_flash.operators.request import Request
from otdd_flash.study.setup import Setup
from otdd_flash.study.units.unit import Bench


def request_of(setup: Setup, bench: Bench) -> Request:
    """The request of all tasks.

    Raises:
        InputError: the device or its memory is short of what a term takes.
    """
    settings = setup.settings

    def prepare() -> Request:
        datasets = [task.train for task in setup.tasks]
        return Request.prepare(datasets, settings.cost, settings.compute, resident=True)

    return bench.cached("request", prepare)
