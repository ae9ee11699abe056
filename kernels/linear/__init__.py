"""Kernels of linear systems: conjugate gradients, and numbers as sums of two float16."""
