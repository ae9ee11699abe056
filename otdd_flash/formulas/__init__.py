"""The formulas of an iteration: the bounds that potentials prove, and the step that follows.

Each is written once and runs on tensors (S,) of many problems, on Python floats of one problem, and
in a Triton kernel for a block of problems: `operations` has what differs between the three.
`evidence` computes bounds and errors of an evaluation, `decision` accepts steps and ends levels and
problems, `differences` is L-BFGS. The classes of `engine` evaluate softmins, call these functions,
and move the potentials; `kernels.segments.decision` compiles them. The modules of `solver` and
`operators` use `marginals` and the bounds.

A function that is compiled is at the top level of its module, has no loops, calls nothing but its
neighbours and `operations`, and returns a number or a NamedTuple of fields alone. It branches only
on `of_mass_one`, which is known when a kernel is compiled: a choice between numbers is `where`.
Constants of a module are float64 wherever they meet a number.
"""
