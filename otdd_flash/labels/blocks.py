"""Distances between the classes of one dataset and those of another, and no others.

A table over many datasets consists of such blocks, which can be measured one by one: a distance is
the same to the last bit whatever other pairs are measured beside it.
"""

from __future__ import annotations

import os
from itertools import product

import torch

from otdd_flash.labels.classes import merge_identical, pool
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.metrics import LabelMetric, NoLabels
from otdd_flash.labels.pairs import PairDistances, symmetric_table
from otdd_flash.samples import LabeledSamples


def class_block(
    first: LabeledSamples,
    second: LabeledSamples,
    metric: LabelMetric,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PairDistances:
    """Squared distances (V_1, V_2) between the classes of two datasets, with bounds, on the CPU.

    Args:
        first: a dataset in which every class has samples of positive weight.
        second: another one, or the same object for the block of a dataset with itself.
        metric: how to measure; any but `Given`.
        cache_dir: as for `measure_pairs`.

    Raises:
        InputError: labels are missing, or a class is too small or too large for the method.
    """
    shape = first.class_total, second.class_total
    if isinstance(metric, NoLabels):
        return PairDistances.exactly(torch.zeros(shape))
    same = first is second
    clouds, _ = pool([first] if same else [first, second])
    distinct, index = merge_identical(clouds)
    rows, columns = index[: shape[0]], index[-shape[1] :]
    wanted = {(max(pair), min(pair)) for pair in product(rows, columns) if pair[0] != pair[1]}
    pairs = torch.tensor(sorted(wanted), dtype=torch.int64).reshape(-1, 2)
    found = measure_pairs(distinct, pairs, metric, cache_dir=cache_dir)
    tables = (symmetric_table(part, pairs, len(distinct)) for part in found)
    return PairDistances(*(table[rows][:, columns].cpu() for table in tables))
