"""Entropic transport for a cost that is given as a matrix, or as a function of blocks.

`problem` checks the arguments and makes the operator; the solver is that of clouds. `transport` has
the solve and `result` its result; `loss` is the value for autograd, `plan` the plan. `forbidden`
handles pairs of cost +inf: whether the masses admit a plan without them, and an upper bound.
"""
