"""What is asked of one transport problem, and the term that it ends with.

`epsilon` is the regularisation as the user gave it, `tolerance` the marginal error at which
`solver.solve` stops, as rounding allows it; `result` is the term, with what `solver.certificate`
proved of it.
"""
