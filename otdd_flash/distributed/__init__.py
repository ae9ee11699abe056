"""Processes of a `torch.distributed` group that work on one problem.

`exchange` is what they send each other, in the order of their ranks, with Ctrl-C held back
meanwhile; in `ranks` the first of them leads, the others do what it orders, and hold copies of its
tensors that change. `commands.ranks` and `otdd.led` start the ranks; `operators`,
`labels.by_ranks`, `flows`, `sampling` and others give them orders.
"""
