"""Maps that carry a finished flow over to points that were not in it.

`EntropicMap` follows the velocity field of each step; `NearestParticleMap` copies the displacement
of the nearest particle; `ResidualMap` is a network trained on where the particles began and ended.
`FlowMap` is their common interface, and `relative_error` the distance of a map from a flow that
contained the points. `FlowResult` (`flows.result`) makes the maps; `experiments.flow_maps` compares
them.
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
