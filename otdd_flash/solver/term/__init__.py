"""One transport problem, from a start to a term with its proof.

`alternating` solves the cross term, `symmetric` a self term; `approach` says where to start, from a
sample of the points if there are many; `iteration` when to stop and what to do about a certificate
that falls short, by a `tolerance` that rounding allows. `certificate` proves what potentials are
worth, from the `plan_evidence` of evaluated `plans` and its `plan_numbers`; `result` is the term.
"""
