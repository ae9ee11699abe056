"""Small divergences, and on a GPU given matrices: `route` says which, `pooled_solve` solves them.

Tensors made for a problem are kept for the next of its size, on a GPU recordings as well; `forget`
gives their memory back. `solver.solving`, `derivatives.loss` and `ranking.bounds` call `route`.
"""

from otdd_flash.solver.small.pooled_solve import forget

__all__ = ["forget"]
