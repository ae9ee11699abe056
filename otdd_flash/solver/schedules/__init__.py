"""The options `solver=`, one file for each way to solve a term; `solver.divergence` reads them."""
