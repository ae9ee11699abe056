"""Maps that carry a finished flow over to points that were not in it.

`entropic` follows the velocity of every step; `nearest` copies the displacement of the nearest
particle; `residual` is a network trained on where the particles began and ended, by `training`.
`base` says what a map is, and how far one is from the flow that had the points inside.
"""

from otdd_flash.flows.maps.entropic import EntropicMap, VelocityField
from otdd_flash.flows.maps.nearest import FlowMap, NearestParticleMap, relative_error
from otdd_flash.flows.maps.residual import ResidualMap

__all__ = [
    "EntropicMap",
    "FlowMap",
    "NearestParticleMap",
    "ResidualMap",
    "VelocityField",
    "relative_error",
]
