"""Exact transport, epsilon = 0: a linear program on few arcs, and bounds by a pass over all pairs.

`pricing` passes over all costs in float64, `program` solves on the arcs found, `bounds` proves,
`solve` is the loop of these, which makes an `ExactTerm` (`solver.term`), `slopes` how OT_0 changes
with the masses of a class. `solver.solving` and `solver.matrix.transport` call `solve`, and
`contributions` calls `slopes`.
"""
