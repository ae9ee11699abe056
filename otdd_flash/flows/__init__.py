"""Gradient flows that move a labelled dataset towards another.

    dx_i / dt = -n dF / dx_i,      F(x) = S_epsilon(x, target) + sum_k w_k F_k(x)

In the order in which a flow uses them: `flow` is what may be asked of one and `run` the flow
itself; `space` moves pixels where a network sees features; `divergence` solves S_epsilon with warm
starts; `modes` says what moves beside the points, `gaussians` the Gaussians that may; `functionals`
are what may be added to the objective; `evaluation` finds it, `stepping` takes a step and `loop`
repeats both, while both sides come to the CPU (`departure`); `history` records steps and
`checkpoint` lets the flow survive; `result` keeps what happened, and `maps` carries it over to new
points.
"""
