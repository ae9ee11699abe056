"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`solving` solves the terms of a comparison; `divergence` solves them in turn, within one budget or
until their bounds are narrow, and is their debiased combination; `shortfall` says what to do where
that stops early. `schedules` are the options of the ways to solve a term: `converged` to a goal, or
`geomloss`, the fixed updates of that library, for comparisons. `solve` is one term from a start to
its `certificate`, and `term` what it is asked and what it gives; the iterations themselves are
those of `engine`, and `segmented` solves many problems by them side by side. `small` problems are
solved with all terms side by side, on stored scores; `matrix` compares by given costs.

First derivatives in closed form: `term_gradient` of a solved term, `gradient` of the divergence.
What needs the linear system of `schur`: `curvature` and `hessian` are second derivatives, `adjoint`
and `cost_weights` the derivatives of a function of the plan or of its potentials. Of few points the
plan is held (`dense_plan`) and the system decomposed (`direct`), of more it is solved by
`conjugate_gradients`, preconditioned by `low_rank` where that is slow. `known_gradient`,
`second_derivatives` and `solved_gradient` hand them to autograd.

Entry points are `clouds`, and of tensors, checked by `tensors`: `loss`, `losses`, `potentials` and
`transport_map`, whose plans `plan_blocks` applies about an origin (`centred`).
"""
