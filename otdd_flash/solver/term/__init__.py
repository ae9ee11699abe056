"""What is asked of one transport problem, and the term that it ends with.

`tolerance` has epsilon and the marginal error at which `solver.solve` stops, as the user gave them
and as rounding allows them; `result` is the term, with what `solver.certificate` proved of it.
"""
