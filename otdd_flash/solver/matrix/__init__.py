"""Entropic transport for a cost that is given as a matrix, or as a function of blocks.

`comparison` checks the arguments and makes the operators; terms are solved as those of clouds are.
`transport` has the solve and `result` its result; `loss` is the value for autograd, `plan` the
plan. `forbidden` handles pairs of cost +inf: whether the masses admit a plan without them, and an
upper bound.
"""
