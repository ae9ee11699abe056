"""The options of a solve, one file for each way to solve; `solver.divergence` solves by them."""
