"""Distances between classes: W, the table that the ground cost reads at every pair of labels.

Concepts, one file each: `classes` cuts datasets into class clouds and pools them; `moments` gives
their means and covariances; `gaussian`, `exact` and `sinkhorn_pairs` each measure a list of pairs;
`metric` says how, `measuring` chooses among them and leaves out what `pair_cache` knows; `table`
holds the result for two datasets, `many` for several; `small_classes` drops what is too small.

W holds squared 2-Wasserstein distances for the cost ||.||^2, whatever lambda_x is.
"""

from otdd_flash.labels.many import JointClassDistances, class_distances
from otdd_flash.labels.methods import measure_classes
from otdd_flash.labels.metric import LabelMetric
from otdd_flash.labels.small_classes import drop_small_classes, notice_single_samples
from otdd_flash.labels.table import ClassDistances

__all__ = [
    "ClassDistances",
    "JointClassDistances",
    "LabelMetric",
    "class_distances",
    "drop_small_classes",
    "measure_classes",
    "notice_single_samples",
]
