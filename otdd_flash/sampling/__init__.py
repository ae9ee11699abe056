"""The sampling error of a distance: its confidence interval, and its noise floor.

`comparison` draws rows and computes the distance between them; `subsampling` repeats it on
subsamples for an interval; `halves` compares disjoint halves of one dataset. `otdd_flash`,
`commands.compare`, `ranking.race` and `study.measures` import their names from here, and others,
such as `mixing.mixture` and `study.study`, from the modules themselves.
"""

from otdd_flash.sampling.halves import NoiseFloor, noise_floor
from otdd_flash.sampling.subsampling import SubsampleInterval, subsample_interval

__all__ = ["NoiseFloor", "SubsampleInterval", "noise_floor", "subsample_interval"]
