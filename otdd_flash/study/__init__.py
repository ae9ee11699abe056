"""Dataset-transfer studies: which dataset to train on first, and which measures predict it.

The way of the data:

    tasks -> units (class distances, terms, draws, scores, trained sources, runs) -> readings, gains
          -> statistics of ordered pairs

Concepts: a `task` is a dataset with rows to test on; a `setup` is tasks and resolved settings, from
which `study_units` makes the list of `units`; a `bench` is where these are computed; `measures` say
which units they take and what these tell of a pair; `transport` and `transfer` hold the units of
distances and of networks; `statistics` say what all pairs tell of a measure; `study` runs a study
in a `folder`, alone or with a `pool` of processes, and `result` is what comes of it.
"""
