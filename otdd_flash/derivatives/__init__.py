"""Derivatives of entropic optimal transport by its inputs, first and second, for autograd.

First derivatives in closed form: `gradient`, of the terms and of the divergence. Derivatives that
need the linear system of a plan, `plan_system`: `curvature` and `hessian` are second derivatives,
with the products of `plan_points`, and `adjoint` has those of a function of the plan or of its
potentials. For few points the plan is stored and the system factorized; for more it is solved by
`engine.conjugate_gradients`. `autograd` takes results with derivatives of their own. `centred`
applies plans to points relative to an origin.

Where a plan does not tie groups of points together, offsets of their potentials are not unique:
`groups` finds these groups by `plan_links`, `group_flows` balances them, and results that depend on
the offsets say so.

Entry points, whose tensors `solver.tensors` checks: `loss`, `potentials` and `hessian`. Given
matrices have entry points of their own, in `solver.matrix`. `flows`, `contributions`, `result`,
`labels.gaussian` and `batched` use modules of this folder.
"""
