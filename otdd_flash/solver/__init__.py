"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`schedule` says what every way to solve has and `schedules` which there are: `converged` to a goal,
`geomloss_schedule` by the fixed updates of that library, for comparisons. `alternating` the cross
term, `approach` where it starts, from a sample of the points and down `levels` of epsilon;
`symmetric` a self term; `iteration` the loop of both, `quasi_newton` what makes it short, `trust`
which of its steps are kept, `quasi_newton_kernels` the same on a GPU; `sweep` and `late_reader` let
short ones run without waiting for the device; `evidence` what potentials prove, and what rounding
allows; `term` what a solve returns; `term_solves` all terms within one budget, `bound_width` until
their bounds are narrow, `shortfall` what to say when they are not; `divergence` the debiased
combination; `problem` two clouds and their three terms; `gradient` derivatives of a solved term and
of the divergence; `clouds` and, for autograd, `loss` the entry points.

`segmented` solves many problems side by side; `segmented_quasi_newton` are their iterations, with
`segmented_differences` what they learn, and `segmented_kernels` the same on a GPU;
`segmented_cross` and `segmented_self` solve cross and self terms.
"""
