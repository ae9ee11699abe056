"""The iterations that solve transport problems, many side by side or one alone, and their evidence.

A problem is a segment: a cost with masses, and vectors of its columns. `segments` says what an
evaluation of its potentials tells and what a move changes, `rule` what problems and iterations look
like from outside, `run` repeats iterations until all are done, with `late_reader` to read the
device late and `recording` to repeat short steps as a CUDA graph. `quasi_newton` is one iteration,
which decides by `otdd_flash.formulas`; `quasi_newton_kernels` is the same in Triton, `few_problems`
for few problems in Python floats. `evidence` has what potentials of one problem prove.

A single problem is a segment of its own, whatever holds its cost (`operators.one_problem`).
"""
