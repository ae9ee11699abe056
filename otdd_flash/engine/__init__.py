"""The iterations of S transport problems side by side; a single one is S = 1.

`segments` says what a problem and its vectors are, `rule` what an iteration is and when one is
done, `run` runs it; `quasi_newton` chooses the steps, with `differences` what they learn, `trust`
which of them are kept and `levels` at which epsilon; `quasi_newton_kernels` is the same on a GPU.
`evidence` says what an evaluation proves. `recording` and `late_reader` let short steps run without
waiting for the device.
"""
