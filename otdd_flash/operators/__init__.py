"""Ways of holding a ground cost: one class each, all with the operations of `base.Operator`.

`tiled` the passes in PyTorch; `streamed` scores of points and labels, computed again in every pass;
`stored` scores kept in memory; `kernel` half-steps in Triton on a GPU, over points that `packed`
puts into class-pure blocks; `build` the choice between them; `memory` what scores may take.
"""
