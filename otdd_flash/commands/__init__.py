"""The commands: settings, loading of data, progress, messages, exit codes and the work of each.

The entry points `otdd_flash.distance`, `otdd_flash.flow`, `otdd_flash.nearest`, `otdd_flash.mix`,
`shift.__main__` and `study.__main__` call `start`, which begins and ends the process with
`arguments` and `ranks`. Hydra then runs the jobs through `outcome`: `compare`, `adapt`, `nearest`,
`mix`, `shift` and `study` are the work of the commands. They use `settings`, `sides`, `messages`
and `results`.

Help must be shown without torch, so no module that `start` imports at its top may import torch.
"""
