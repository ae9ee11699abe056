"""Transfer runs: a network trained on a source, and what that spares on a few rows of a target.

Concepts, one file each: `settings` say how networks are trained; `networks` are what is trained and
how weights are drawn; `training` is the loop; `units` are trained sources, transfer runs and runs
on the target alone; `gains` make percentages of their errors.
"""
