"""Certificates of any potentials of a transport problem: values, bounds, errors.

The formulas take tensors of shape () for one problem or (S,) for S problems side by side. `dual`
has the lower bound and the gain of an update, `oscillation` and `primal` have upper bounds. A plan
is computed with errors: `perturbed_costs` is about the plan of one problem, each entry of which is
computed once, `two_passes` about softmins of many problems, `scale` about the usual size of errors.

`evaluated` has what an `Evaluation` of S problems proves. `kernels.segments.evidence` has that once
more, for use inside of Triton kernels; `solver.certificate` proves the term of one problem.
"""
