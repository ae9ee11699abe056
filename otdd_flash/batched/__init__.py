"""Many small matrices side by side.

Entry points are `plans`, which give `small_plans` with their `bounds`, and `doubly_stochastic`,
both `checking` what they are given. `balance` is the operation of PyTorch that scales rows and
columns in turn (`problems` say of what): in kernels on a GPU, else on the `cpu` chunk by chunk
(`chunks`, `scalings`, `cpu_backward`). `adjoint` is the gradient at the optimum, whatever the
iterations.
"""
