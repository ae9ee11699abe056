"""Many small matrices side by side.

Entry points are `plans`, with solver bounds, and `doubly_stochastic`, both `checking` what they are
given and where it is computed. `balance` is the operation of PyTorch that scales rows and columns
in turn: in kernels on a GPU, else on the `cpu`, by `chunks`; arguments and results of both are in
`otdd_flash.kernels.batched.problems`. `adjoint` is the gradient at the optimum, whatever the
iterations. `otdd_flash` exports the entry points; `attention` and `nn` use `checking` and
`recorded`.
"""
