"""Small divergences, and on a GPU given matrices: `route` says which, `pooled_solve` solves them.

`kept_solves` holds what was made for the next problem of a size, on a GPU recordings as well;
`forget` gives that memory back.
"""

from otdd_flash.solver.small.kept_solves import forget

__all__ = ["forget"]
