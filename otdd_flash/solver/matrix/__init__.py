"""Entropic transport for a cost that is given as a matrix, or as a function of blocks.

`comparison` checks what was given and makes the operators; terms are solved as those of clouds are.
`transport` is the solve and `result` what it gives; `loss` is the value for autograd, `plan` the
plan. `forbidden` is about pairs of cost +inf: whether the masses admit a plan, and an upper bound
without them.
"""
