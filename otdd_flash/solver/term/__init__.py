"""One transport term: its stopping rule and its result.

`tolerance` resolves epsilon and the marginal error at which `solver.solve` stops, from what the
user gave and rounding allows; `result` is the solved term, with the bounds of `solver.certificate`.
"""
