"""The commands: settings, loading of data, progress, messages, exit codes and the work of each.

The entry points `otdd_flash.distance`, `otdd_flash.flow`, `otdd_flash.mix` and `study.__main__`
call `start`, which begins and ends the process with `choices`, `hydra_errors` and `ranks`, and
holds the exit codes. Hydra then runs the jobs through `outcome`: `compare`, `adapt`, `mix` and
`study` are the work of the four commands. They use `settings`, `sides`, `progress`, `messages` and
`results`.

Help must be shown without torch, so what `start` imports at its top may not import torch.
"""
