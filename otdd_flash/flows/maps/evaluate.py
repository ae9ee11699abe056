"""How far a map is from the flow that had the points inside."""

from __future__ import annotations

from otdd_flash.errors import InputError
from otdd_flash.flows.maps.base import FlowMap, check_same_particles
from otdd_flash.samples import LabeledSamples


def relative_error(flow_map: FlowMap, samples: LabeledSamples, truth: LabeledSamples) -> float:
    """(sum_i a_i |map(z_i) - t_i|^2 / sum_i a_i |t_i - z_i|^2)^1/2 of samples z with masses a.

    0 is perfect, and the identity has 1.

    Args:
        flow_map: of a flow without the samples.
        samples: k points z at the start.
        truth: the same points, row by row, at the end of a flow that had them inside.

    Raises:
        InputError: the two are not of one shape, the truth did not move, or the map refuses the
            samples.
    """
    check_same_particles(samples, truth)
    moved = flow_map(samples).features.double()
    masses, start = samples.masses, samples.features.double()
    end = truth.features.to(start)
    distance = masses @ (end - start).square().sum(1)
    if not float(distance) > 0:
        raise InputError("the truth is where the samples began, so no error is relative to it")
    return float((masses @ (moved - end).square().sum(1) / distance).sqrt())
