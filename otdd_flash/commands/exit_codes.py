"""How a command's process ends; 0 means done."""

from __future__ import annotations

DEFECT = 1
BAD_INPUT = 2
NOT_CONVERGED = 3
# The number is there; a file beside it is not.
INCOMPLETE = 4
INTERRUPTED = 130
