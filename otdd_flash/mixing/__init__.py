"""Mixtures of datasets: the weights of several sources whose mixture is nearest to a target.

`mixture.mixture` is the public function, which returns a `result.Mixture`; `commands.mix` and users
call it. `sources` makes one cloud of all sources, solves it at weights and bounds the value at all
others, and `weights` chooses the weights to solve at next.
"""
