"""Terms that a flow may add to the divergence that it descends.

    F(x) = S_epsilon(x, target) + sum_k w_k F_k(x),      dx_i / dt = -(1 / a_i) dF / dx_i

They are the three kinds of energy of gradient flows in probability space (Alvarez-Melis & Fusi
2021, Dataset Dynamics via Gradient Flows in Probability Space), for particles x_i of mass a_i and
class l_i:

    potential    sum_i a_i V(x_i, l_i)                norm, affine_norm, hyperplane_margin,
                                                      coordinate_collapse
    interaction  sum_ij a_i a_j W(x_i, l_i, x_j, l_j) class_repulsion
    internal     int rho log rho                      entropy, by noise

and any function of the user. `build_functionals` makes them from a configuration,
`value_and_velocity` evaluates them, and `noise_temperature` says how much noise a step adds.
`flows.run`, `flows.evaluation` and `flows.loop` call these in turn; `flows.flow` stores
`WeightedFunctional`s. Names and parameters of functionals are keys of users' configurations.
"""

from otdd_flash.flows.functionals.build import (
    Functional,
    WeightedFunctional,
    build_functionals,
    noise_temperature,
    value_and_velocity,
)

__all__ = [
    "Functional",
    "WeightedFunctional",
    "build_functionals",
    "noise_temperature",
    "value_and_velocity",
]
