"""The iterations that solve transport problems, many side by side or one alone.

A problem is a segment: a cost with masses, and vectors of its columns, which the engine holds.
`problems` says what an evaluation asks of problems, what a move changes and what iterations look
like from outside; it repeats these until all are done and reads the device late. `recording` makes
a CUDA graph of short steps. `quasi_newton` is one iteration in tensors, `quasi_newton_kernels` the
same in Triton, `few_problems` for few problems in Python floats; their decisions are those of
`formulas`.

`conjugate_gradients` are other iterations, for the linear system of a plan that derivatives solve,
and `conjugate_gradients_kernels` the same in Triton.

A single problem is a segment of its own, whatever holds its cost (`operators.one_problem`).
`solver.solve`, `solver.small`, `labels.sinkhorn_pairs` and `derivatives.plan_system` run them on
the problems that `operators` make.
"""
