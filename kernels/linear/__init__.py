"""Kernels of linear systems: conjugate gradients, and numbers as sums of two float16.

`engine.conjugate_gradients_kernels` calls those of conjugate gradients and `to_halves`,
`operators.triton_plans` and kernels of `passes` the others.
"""
