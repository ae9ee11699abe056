"""Ways of holding a ground cost, all with the members of `base.Operator`.

Between labelled clouds: a `comparison` holds them, checked, moved and seen by the ground cost once,
with class distances and epsilon. `build` chooses between `triton_operator`, the passes in Triton on
a GPU, and `torch_operator`, those in PyTorch over a source of scores: `point_scores` are kept in
memory, or computed again in every pass. It says what operators take of the memory.

What certificates read: tiles of costs in float64 (`point_scores`), `fixed_point` the sums of a plan
in Triton, `whole_points` points whose products are exact.

Points that stay in host memory or in files are read a block at a time, and `packed_blocks` packs
them once; `blocked` is the cost of one block of rows and one of columns after the other, and puts
together what is found of pairs of blocks, whoever brings them.

Costs that are given: `given_costs` are a matrix in memory or a function of blocks, `matrix_kernel`
is a matrix in Triton.

Plans of potentials, evaluated in every product or prepared for many: `base` has what they are
asked and those of PyTorch, `triton_plans` those of Triton, also with the points as they are packed.

Processes that share a cost: `sharing` has them build it, `sharded` is what rank 0 sees, `parts`
what every rank holds of it; `owned` says which points are whose, `self_share` which pairs of a
cloud with itself (`kernel_self_share` in Triton), and in a `ring` the points, or `ring_blocks` of
them as they are packed, go round; `ring_pairs` are the pairs of a rank there.

Problems of the engine (`engine.problems`): `one_problem` is an operator as the only one,
`one_kernel_problem` the same in Triton. Pairs of classes are many: `stored_segments` and
`anchored_segments` keep their scores in PyTorch, tile by tile (`segment_tiles`), `kernel_segments`
computes them in Triton on the points of a `class_pool`, whose sums are `class_sums`. The terms of a
small divergence are the problems of a `score_pool`, which also has the terms for certificates:
`kernel_pool` in Triton, `torch_pool` on a processor; a given matrix is a `matrix_pool`.
"""
