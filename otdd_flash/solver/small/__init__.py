"""Small divergences and given matrices on a GPU: `route` says which, `pooled_solve` records them.

`kept_solves` holds recordings for the next problem of a size; `forget` gives their memory back.
"""

from otdd_flash.solver.small.kept_solves import forget

__all__ = ["forget"]
