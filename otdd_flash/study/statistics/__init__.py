"""Statistics of ordered pairs of tasks: how well measures predict gains, and with what certainty.

`statistics` has the table of pairs, correlations, regrets, intervals by the jackknife over
datasets, p-values by permutation of tasks and the ceiling that noise sets. `findings` applies all
of them to every measure of a study, and says for each target which source a measure chooses.
`study.result` calls both, and the modules of `report.study` show the rows.
"""
