"""Gradient flows that move a labelled dataset towards another.

    dx_i / dt = -(1 / a_i) dF / dx_i,      F(x) = S_epsilon(x, target) + sum_k w_k F_k(x)

`run` is the entry point and `flow` holds its options. `space` maps moving points to the features
that transport compares. `objective` solves S_epsilon with warm starts and computes the objective
and its gradient; `modes` and `joint_modes` decide what moves besides the points, such as the
Gaussians of classes, and `functionals` are further terms. `stepping` takes a step, and `run`
repeats both. `checkpoint` stores the state for a later run, `result` is what a flow returns, and
`maps` and `residual_map` carry a finished flow over to new points. `commands.adapt`,
`integrations.sklearn` and `report.flow` use them.
"""
