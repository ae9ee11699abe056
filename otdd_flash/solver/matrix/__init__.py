"""Entropic transport for a cost that is given as a matrix, or as a function of blocks.

`solver.matrix_comparison` checks the arguments and builds the operators; terms are solved as those
of clouds are. The entry points are `transport`, which also handles pairs of cost +inf and whose
result is in `result`, and for autograd `gradients`, of the value and of the plan. `otdd_flash`
exports the entry points; `shift.pooled` calls `matrix_transport`.
"""
