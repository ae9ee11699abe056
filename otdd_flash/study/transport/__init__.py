"""Units of the transport distances of a study, the same numbers as `pairwise_distances` has.

Concepts, one file each: `clouds` are the datasets on the device; `classes` are blocks of class
distances and the epsilon that may follow from them; `terms` are the self terms and cross terms;
`sampling` are intervals by subsamples and noise floors.
"""
