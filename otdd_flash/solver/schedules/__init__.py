"""The options `solver=`, one file for each way to solve a term; `solver.divergence` reads them.

`commands.settings` builds them, and `solver.solving` chooses a route by them.
"""
