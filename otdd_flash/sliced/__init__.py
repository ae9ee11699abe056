"""Sliced dataset distances: labelled datasets as numbers on a line, along random draws.

Concepts, one file each: `draws` are the random directions, weights and orders of moments; `numbers`
turns a dataset into sorted numbers, one list per draw; `quantiles` compares two such lists;
`distances` does so for all pairs of several datasets; `result` holds means, errors and intervals;
`tails` estimates how heavy tails are, which decides how long an interval is above.
"""
