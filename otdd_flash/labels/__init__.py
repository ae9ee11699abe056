"""Distances between classes: W, the table that the ground cost reads at every pair of labels.

Concepts, one file each: `classes` cuts datasets into class clouds and pools them; `moments` gives
their means and covariances; `gaussian`, `exact` and `sinkhorn_pairs` each make a table over a list
of clouds; `methods` chooses among them; `table` holds the result; `small_classes` drops what is too
small for it.

W holds squared 2-Wasserstein distances for the cost ||.||^2, whatever lambda_x is.
"""

from otdd_flash.labels.methods import LabelMetric, measure_classes, table_of
from otdd_flash.labels.small_classes import drop_small_classes
from otdd_flash.labels.table import ClassDistances

__all__ = ["ClassDistances", "LabelMetric", "drop_small_classes", "measure_classes", "table_of"]
