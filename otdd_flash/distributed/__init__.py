"""Processes of a `torch.distributed` group that work on one problem.

`exchange` is what they send each other, in the order of their ranks; in `ranks` the first of them
leads, and the others do what it orders. `interrupts` has Ctrl-C wait until they have done so.
`copies` are of its tensors that change. `shared` says how work was shared. `commands.ranks` and
`otdd.led` start the ranks; `operators`, `labels.by_ranks`, `flows`, `sampling` and others give them
orders.
"""
