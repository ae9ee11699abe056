"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`problem` is two clouds and their three terms, `divergence` their debiased combination. `schedules`
are the ways to solve a term: `converged` to a goal, or `geomloss`, the fixed updates of that
library, for comparisons. `term` is one solve, from where it starts to its certificate; the
iterations themselves are those of `engine`, and `segmented` solves many problems by them side by
side. `term_solves` solves all terms within one budget, `bound_width` until their bounds are narrow,
and `shortfall` says what to do when they are not. `small` problems are solved on a GPU with all
terms side by side. `gradient` holds derivatives of a solved term and of the divergence; the entry
points are `clouds` and, for autograd, `loss`.
"""
