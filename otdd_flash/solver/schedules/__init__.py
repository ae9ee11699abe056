"""Ways to solve: one file each, by their names in `SCHEDULES`."""

from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule

SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in (Converged, GeomlossSchedule)}
