"""All units of a study, in the order in which they can be computed."""

from __future__ import annotations

from otdd_flash.plugins import blamed_on
from otdd_flash.study.measures import measures_named
from otdd_flash.study.setup import Setup
from otdd_flash.study.transfer.units import transfer_units
from otdd_flash.study.transport.classes import Epsilon
from otdd_flash.study.transport.terms import Term
from otdd_flash.study.units.unit import Unit
from otdd_flash.study.units.work import in_order


def study_units(setup: Setup) -> list[Unit]:
    """List the units of a study's measures, and of its transfer runs."""
    settings = setup.settings
    with_transfer = settings.transfer is not None
    measures = measures_named(settings.measures, transfer=with_transfer)
    units: list[Unit] = []
    for measure in measures:
        with blamed_on(measure, f"measure {measure.name}"):
            units += measure.units(setup)
    if any(isinstance(unit, Term) for unit in in_order(units)):
        units.append(Epsilon(setup))
    if with_transfer:
        units += transfer_units(setup)
    return in_order(units)
