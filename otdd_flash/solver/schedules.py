"""Ways to solve: one file each, by their names in `SCHEDULES`."""

from otdd_flash.solver.converged import Converged
from otdd_flash.solver.geomloss_schedule import GeomlossSchedule
from otdd_flash.solver.schedule import Schedule

SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in (Converged, GeomlossSchedule)}
