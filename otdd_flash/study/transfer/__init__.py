"""Transfer runs: a network is trained on a source, then on a few rows of a target.

`networks` holds the settings of training, the networks and their initial weights. `training` holds
the training loop, the units of trained sources and target runs, and the gains computed from their
errors. `study.study`, `study.pool`, `study.result` and `study.measures.network` use them.
"""
