"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`schedule` says what every way to solve has and `schedules` which there are: `converged` to a goal,
`geomloss_schedule` by the fixed updates of that library, for comparisons. `alternating` solves the
cross term, `symmetric` a self term; `approach` says where to start, from a sample of the points if
there are many, `iteration` when to stop and what to do about a certificate that falls short. The
iterations themselves are those of `engine`; `segmented` solves many problems by them side by side.
`certificate` proves what potentials are worth, after evaluating `plans`; `term` is what a solve
returns; `term_solves` all terms within one budget, `bound_width` until their bounds are narrow,
`shortfall` what to say when they are not; `divergence` the debiased combination; `problem` two
clouds and their three terms; `small` says which of them are small enough for a GPU to solve all
terms side by side, as `pooled_solve` does in recordings that it keeps; `gradient` derivatives of a
solved term and of the divergence; and `clouds` and, for autograd, `loss` the entry points.
"""
