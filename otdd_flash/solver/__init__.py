"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`solving` solves a comparison. `divergence` solves its terms in turn, within one budget or until
their bounds are narrow, and combines them; `shortfall` words the message where that stops early.
`schedules` has the options of each way to solve a term: `Converged` iterates to a tolerance, and
`geomloss` runs the fixed updates of that library, for comparisons. `solve` takes one term from its
initial potential to its `certificate`, or many side by side; `term` has its tolerance and its
result. The iterations are those of `engine`. `small` solves all terms of a small problem at once,
on stored scores. `matrix` has the entry points for given costs, of which `matrix_comparison` makes
a comparison.

`solving` has the entry points for clouds of points too; `tensors` checks those that are given as
tensors, to `derivatives` as well, which has losses and other functions for autograd. `otdd`,
`pairwise`, `flows`, `gromov`, `mixing` and `derivatives` call `solving`.
"""
