"""One iteration of many problems side by side: passes, evaluations, decisions, moves.

`engine.quasi_newton_kernels` calls them, and `operators.kernel_segments` the pass.
"""
