"""What ordered pairs of tasks say of a measure: correlations with gains, and how sure they are.

Concepts, one file each: `pairs` is the table of a measure and of gains; `statistics` are numbers of
such tables, many tables at a time; `jackknife` makes intervals of them by leaving out datasets,
`permutation` p-values by exchanging tasks; `partial` frees both sides of the sizes of datasets;
`ceiling` says which correlation noise in the gains allows; `findings` gathers all of it; `choices`
says target by target which source a measure chooses, and what that costs.
"""
