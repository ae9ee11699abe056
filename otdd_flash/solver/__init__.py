"""Entropic optimal transport, solved to a marginal error and certified; written against `Operator`.

`options` when to stop; `alternating` the cross term; `symmetric` a self term; `certificate` value
and bounds from potentials; `divergence` the debiased combination; `clouds` the entry points.
"""
