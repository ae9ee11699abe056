"""Ways of holding a ground cost: one class each, all with the operations of `base.Operator`.

`labelled_cost` two labelled clouds and their cost, which the others read; `tiled` the passes in
PyTorch; `streamed` scores computed again in every pass; `stored` scores kept in memory; `kernel`
the passes in Triton on a GPU, `lattice` the points that they need not round; `build` the choice
between them; `footprint` and `memory` what they take and what there is.

Many problems side by side, one per pair of classes, have an interface of their own: `segments`;
`stored_segments` and `anchored_segments` keep their scores in PyTorch, and their vectors as
`padded_vectors`; `kernel_segments` computes scores in Triton on the points of a `class_pool`.
"""
