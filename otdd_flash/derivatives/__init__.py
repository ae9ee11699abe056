"""Derivatives of entropic optimal transport by its inputs, first and second, for autograd.

First derivatives in closed form: `term_gradient` of a solved term, `gradient` of the divergence.
What needs the linear system of a plan, `plan_system`: `curvature` and `hessian` are second
derivatives, `adjoint` those of a function of the plan or of its potentials. For few points the plan
is stored and the system factorized; for more it is solved by `conjugate_gradients`.
`known_gradient`, `second_derivatives` and `solved_gradient` hand them to autograd.

Entry points, whose tensors `solver.tensors` checks: `loss`, `losses`, `potentials`, `transport_map`
and `hessian`. `plan_blocks` applies plans relative to an origin (`centred`), and `groups` says
where potentials are not unique. Given matrices have entry points of their own, in `solver.matrix`.
"""
