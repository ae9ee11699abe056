"""Distances between classes: W, the table that the ground cost reads at every pair of labels.

Concepts, one file each: `classes` cuts datasets into class clouds and pools them; `moments` gives
their means and covariances; `gaussian`, `exact` and `sinkhorn_pairs` each measure a list of pairs;
`metrics` are the ways of measuring, one type each, of which `labels=` takes one or its name;
`measuring` leaves out what `pair_cache` knows; `table` holds the result for two datasets, which
`two` measures, `many` those of several; `small_classes` drops what is too small.

W holds squared 2-Wasserstein distances for the cost ||.||^2, whatever lambda_x is.
"""

from otdd_flash.labels.many import (
    JointClassDistances,
    class_distances,
    drop_small_classes,
    measure_classes,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.metrics import (
    METRICS,
    Exact,
    Gaussian,
    Given,
    LabelMetric,
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
from otdd_flash.labels.table import ClassDistances

__all__ = [
    "METRICS",
    "ClassDistances",
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
    "UpperBound",
    "class_distances",
    "drop_small_classes",
    "fields_of",
    "measure_classes",
    "metric_named",
    "metric_of",
    "notice_single_samples",
    "settled_metric",
]
