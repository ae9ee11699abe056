"""Entropic transport for a cost that is given as a matrix, or as a function of blocks.

`solver.matrix_comparison` checks the arguments and builds the operators; terms are solved as those
of clouds are. The entry points are `transport`, whose result is in `result`, and for autograd
`loss`, the value, and `plan`, the plan. `forbidden` handles pairs of cost +inf: whether the masses
admit a plan without them, and an upper bound.
"""
