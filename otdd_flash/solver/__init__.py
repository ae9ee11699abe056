"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`schedule` says what every way to solve has and `schedules` which there are: `converged` to a goal,
`geomloss_schedule` by the fixed updates of that library, for comparisons. `alternating` the cross
term, `approach` where it starts, from a sample of the points or down levels of epsilon;
`symmetric` a self term; `iteration` runs the `engine` for both, `segmented` for many terms side by
side; `certificate` what potentials prove, `cross_certificate` and `self_certificate` of which term,
from an `evaluated_plan`, `polytope` the plans that prove upper bounds, `rounding` what tolerances
allow; `term` what a solve returns; `term_solves` all terms within one budget, `bound_width` until
their bounds are narrow, `shortfall` what to say when they are not; `divergence` the debiased
combination; `problem` two clouds and their three terms; `gradient` derivatives of a solved term and
of the divergence; `clouds` and, for autograd, `loss` the entry points.
"""
