"""Maps that carry a finished flow over to points that were not in it.

`field` is the velocity of one step at any point, `entropic` follows it step by step; `nearest`
copies the displacement of the nearest particle; `residual` is a network trained on where the
particles began and ended, by `training`. `classes` and `neighbours` find a new point's class and
particle; `evaluate` compares a map with the flow that had the points inside.
"""

from otdd_flash.flows.maps.base import FlowMap
from otdd_flash.flows.maps.entropic import EntropicMap
from otdd_flash.flows.maps.evaluate import relative_error
from otdd_flash.flows.maps.field import VelocityField
from otdd_flash.flows.maps.nearest import NearestParticleMap
from otdd_flash.flows.maps.residual import ResidualMap

__all__ = [
    "EntropicMap",
    "FlowMap",
    "NearestParticleMap",
    "ResidualMap",
    "VelocityField",
    "relative_error",
]
