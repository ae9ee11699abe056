"""Processes of a `torch.distributed` group that work on one problem."""
