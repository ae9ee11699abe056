"""Distances between classes: W, the table that the ground cost reads at every pair of labels.

W holds squared distances for the cost ||.||^2, whatever lambda_x is: 2-Wasserstein distances,
bounds of them, or what a user's table or function says. The modules, from data to table: `pairs`
cuts datasets into class clouds, lists pairs of classes and cuts such lists; `gaussian`, `exact` and
`sinkhorn_pairs` measure a list of pairs; `metrics` holds the methods that `labels=` names, and
numbers in place of classes; `measuring` measures the tables of whole datasets, as far as
`pair_cache` does not know them, `by_ranks` on several ranks; `table` holds such tables.

`otdd`, `pairwise`, `result`, and modules of `commands`, `flows`, `gromov`, `mixing`, `ranking`,
`sampling`, `shift` and `study` import their names from here, and users as `otdd.labels`. These
names must stay.
"""

from otdd_flash.labels.measuring import (
    class_distances,
    drop_small_classes,
    measure_classes,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.metrics import (
    METRICS,
    Continuous,
    Exact,
    Gaussian,
    Given,
    Labels,
    Means,
    NoLabels,
    PairFunction,
    Sinkhorn,
    UpperBound,
    fields_of,
    metric_named,
    metric_of,
)
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.metrics.tree import Tree
from otdd_flash.labels.table import ClassDistances, JointClassDistances
from otdd_flash.operators.label_costs import set_table

__all__ = [
    "METRICS",
    "ClassDistances",
    "Continuous",
    "Exact",
    "Gaussian",
    "Given",
    "JointClassDistances",
    "LabelMetric",
    "Labels",
    "Means",
    "NoLabels",
    "PairFunction",
    "Sinkhorn",
    "Tree",
    "UpperBound",
    "class_distances",
    "drop_small_classes",
    "fields_of",
    "measure_classes",
    "metric_named",
    "metric_of",
    "notice_single_samples",
    "set_table",
    "settled_metric",
]
