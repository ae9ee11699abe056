"""Dataset-transfer studies: which dataset to train on first, and which measures predict it.

The data pass through these stages:

    tasks -> units (class distances, terms, draws, scores, trained sources, runs) -> readings, gains
          -> statistics of ordered pairs

A task is a dataset with test rows. `setup` holds tasks and resolved settings. A unit is one piece
of work, stored in the study's folder under a digest of all that its result depends on (`units`).
`measures` name the units they need and read values of ordered pairs from them; `training` holds the
networks and units of transfer runs. `study.study` runs a study in a folder, alone or with worker
processes. `result` gathers what is done; `statistics` and `findings` say how well measures predict
gains. `commands.study` runs studies from the command line, and `report.study` writes their reports.
"""
