"""Operators: costs with masses, by how the cost is held and where passes over it run.

Operators proper have the members of `base.Operator`, by which solvers and derivatives call them.
Around them are plans, the engine's problems and pools of small problems, in chapters of their own
below.

Between labelled clouds: a `comparison` has the datasets, checked, moved and transformed for the
ground cost once, with class distances and epsilon; `label_costs` puts several labels a row, or
numbers, into its table or its points. `build` chooses between `triton_operator`, with passes in
Triton on a GPU, and `torch_operator`, with passes in PyTorch over a source of scores;
`point_scores` stores these or recomputes them in every pass. `build` also counts their memory.

Certificates read costs in float64, tile by tile (`point_scores`), or plan sums in Triton from
points in fixed point (`fixed_point`).

Points in host memory or in files are streamed in blocks, which `packed_blocks` packs once;
`blocked` combines the results of operators of pairs of blocks, also for a `ring` and `self_share`.

Given costs: `given_costs` is a matrix in memory or a function of blocks, `matrix_kernel` a matrix
with passes in Triton.

Plans, evaluated in every product or prepared for many: `base` has their protocols and the plan
that is stored in float64, `triton_plans` those in Triton, also for products with packed points;
`torch_operator`, `blocked` and `sharing` have the plans of their operators.

A cost that processes share: `sharing` builds it on all ranks and has the operator of rank 0,
`parts` is what every rank holds of the cost, and divides the points among ranks; `self_share`
divides the pairs of a self term (in Triton see `triton_operator`). If some rank has no memory for
all points, each holds a shard, and shards circulate in a `ring`.

Problems of the engine (`engine.problems`): `one_problem` is an operator as the only one,
`one_kernel_problem` the same in Triton. Pairs of classes are many: `stored_segments` keeps their
scores in PyTorch, `kernel_segments` computes them in Triton on the points of a `ClassPool`. The
terms of a small divergence are the problems of a `score_pool`, which also has the terms for
certificates: `kernel_pool` in Triton, for a given matrix too, `torch_pool` on a processor.

Entry points prepare a `comparison`; `solver`, `derivatives`, `gromov`, `flows` and `mixing` call
what is built from it. `solver.matrix_comparison` builds operators of given costs, and
`labels.sinkhorn_pairs` problems of pairs of classes.
"""
