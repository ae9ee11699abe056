"""Mixtures of datasets: the weights of several sources whose mixture is nearest to a target.

`mixture.mixture` is the public function, which returns a `result.Mixture`; `commands.mix` and users
call it. `sources` makes one cloud of all sources, `prices` solves it at weights and bounds the
value at all others, `weights` chooses the weights to solve at next, and `intervals` says how far
sampling moves them.
"""
