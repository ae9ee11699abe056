"""The formulas by which iterations are judged: what potentials prove, and how to go on.

Each is written once, for numbers of many problems as tensors (S,), of one problem as Python floats,
and of a block of problems in a Triton kernel: `operations` has what differs between the three.
`evidence` makes bounds and errors of an evaluation, `decision` keeps steps and ends levels and
problems, `differences` is L-BFGS. The classes of `engine` evaluate and move, and call these
functions in between; `kernels.segments.decision` compiles them.

A function that is compiled is at the top level of its module, has no loops, calls nothing but its
neighbours and `operations`, and returns a number or a NamedTuple of fields alone. It branches only
on `symmetric`, which is known when a kernel is compiled: a choice between numbers is `where`.
Constants of a module are float64 wherever they meet a number.
"""
