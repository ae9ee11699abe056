"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`solving` solves a comparison. `divergence` solves its terms in turn, within one budget or until
their bounds are narrow, and combines them; `shortfall` words the message where that stops early.
`schedules` has the options of each way to solve a term: `converged` iterates to a tolerance, and
`geomloss` runs the fixed updates of that library, for comparisons. `solve` takes one term from its
initial potential to its `certificate`, or many side by side; `term` has its tolerance and its
result. The iterations are those of `engine`. `small` solves all terms of a small problem at once,
on stored scores; `matrix` has given costs.

First derivatives in closed form: `term_gradient` of a solved term, `gradient` of the divergence.
What needs the linear system of `schur`: `curvature` and `hessian` are second derivatives, `adjoint`
and `cost_weights` the derivatives of a function of the plan or of its potentials. For few points
the plan is stored (`dense_plan`) and the system factorized (`direct`); for more it is solved by
`conjugate_gradients`, preconditioned by `low_rank` where that is slow. `known_gradient`,
`second_derivatives` and `solved_gradient` hand them to autograd.

Entry points are `clouds`, and of tensors, checked by `tensors`: `loss`, `losses`, `potentials` and
`transport_map`, whose plans `plan_blocks` applies relative to an origin (`centred`).
"""
