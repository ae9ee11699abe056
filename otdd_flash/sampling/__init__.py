"""What a distance owes to the samples: its sampling interval, and the distance of like from like.

Concepts, one file each: `draws` chooses rows without replacement; `comparison` is the distance as a
function of the rows drawn; `subsampling` repeats it on subsamples; `halves` compares halves.
"""

from otdd_flash.sampling.halves import NoiseFloor, noise_floor
from otdd_flash.sampling.subsampling import SubsampleInterval, subsample_interval

__all__ = ["NoiseFloor", "SubsampleInterval", "noise_floor", "subsample_interval"]
