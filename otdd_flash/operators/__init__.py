"""Ways of holding a ground cost: one class each, all with the operations of `base.Operator`.

`labelled_cost` two labelled clouds and their cost, which the others read; `tiled` the passes in
PyTorch; `streamed` scores computed again in every pass; `stored` scores kept in memory; `kernel`
the passes in Triton on a GPU, `lattice` the points that they need not round; `build` the choice
between them; `footprint` and `memory` what they take and what there is.

`request` has the datasets of a comparison, checked, moved and seen by the `ground` cost once.

Iterations run on segments (`engine.rule.Segments`). `one_segment` is the problem of an operator,
`kernel_one_segment` the same in Triton. Pairs of classes are many: `stored_segments` and
`anchored_segments` keep their scores in PyTorch, `kernel_segments` computes them in Triton on the
points of a `class_pool`. The terms of a small divergence are `pooled_segments` of a `score_pool`,
whose scores are stored on a GPU, and each of them a `pooled_operator` for its certificate. Vectors
are `padded_vectors` or, in Triton, `kernel_vectors`.
"""
