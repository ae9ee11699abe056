"""Gradient flows that move a labelled dataset towards another.

    dx_i / dt = -n dF / dx_i,      F(x) = S_epsilon(x, target) + sum_k w_k F_k(x)

`modes` says what moves beside the points; `divergence` solves S_epsilon with warm starts;
`functionals` are what may be added to it; `space` moves pixels where a network sees features;
`evaluation` finds the objective and `stepping` takes a step; `flow` is what may be asked of one,
`callbacks` whom it tells, and `run` the flow itself; `checkpoint` lets it survive; `history` and
`result` say what happened; `maps` carries it over to new points.
"""
