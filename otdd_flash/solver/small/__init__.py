"""Small divergences, and on a GPU given matrices: `route` says which, `pooled_solve` solves them.

What was made for a problem is kept for the next of its size, on a GPU recordings as well; `forget`
gives that memory back. `solver.solving`, `derivatives.loss` and `ranking.bounds` call `route`.
"""

from otdd_flash.solver.small.pooled_solve import forget

__all__ = ["forget"]
