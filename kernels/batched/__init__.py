"""Kernels of many small matrices, each in registers from one end to the other."""
