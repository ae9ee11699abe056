"""The sampling error of a distance: its confidence interval, and its noise floor.

`comparison` draws rows and computes the distance between them; `subsampling` repeats it on
subsamples for an interval, and compares disjoint halves of one dataset. `otdd_flash`,
`commands.compare`, `ranking.race`, `study`, `mixing.mixture` and others call them.
"""
