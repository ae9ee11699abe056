"""Sliced dataset distances: labelled datasets as numbers on a line, along random draws.

`distances` draws random directions, weights and orders of moments, maps datasets to sorted numbers
and compares all pairs; `result` holds means, errors and intervals, and estimates how heavy tails
are, which sets the upper length of an interval. `study.measures.distances` and
`sampling.subsampling` use parts of them; `report.pairwise` draws the result.
"""
