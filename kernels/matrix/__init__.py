"""Passes over a cost matrix in memory: half-steps, both by one read, sums of its plan, facts.

`operators.matrix_kernel` and `operators.kernel_pool` call them.
"""
