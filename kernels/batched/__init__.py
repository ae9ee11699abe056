"""Kernels of many small matrices, each in registers from one end to the other.

`otdd_flash.batched` calls them: `balance` launches the iterations and their derivative, `adjoint`
the gradient at the optimum.
"""
