"""One transport problem, from a start to a term with its proof.

`alternating` solves the cross term, `symmetric` a self term; `approach` says where to start, from a
sample of the points if there are many; `iteration` when to stop and what to do about a certificate
that falls short, by a `tolerance` that rounding allows. `result` is the term, with what
`solver.certificate` proved of it.
"""
