"""The families by name, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable

from experiments.exact_families import duplicates, products
from experiments.exact_families.building import Frame
from experiments.exact_families.problem import Problem

Family = Callable[[Frame], Problem]

FAMILIES: dict[str, tuple[Family, float]] = {
    "two_clusters": (duplicates.two_clusters, 3),
    "clusters": (duplicates.clusters, 4),
    "one_hot": (duplicates.one_hot, 2),
    "grey_values": (duplicates.grey_values, 2),
    "all_equal": (duplicates.all_equal, 1),
    "labels_alone": (duplicates.labels_alone, 2),
    "one_outlier": (duplicates.one_outlier, 2),
    "orders_of_magnitude": (duplicates.orders_of_magnitude, 2),
    "signed_table": (duplicates.signed_table, 2),
    "far_from_origin": (duplicates.far_from_origin, 2),
    "nearly_constant": (duplicates.nearly_constant, 1),
    "gaussian_grid": (products.gaussian_grid, 2),
    "irregular_product": (products.irregular_product, 2),
}


def draw_problem(frame: Frame, family: str | None = None) -> Problem:
    """A problem of a family, or of one that is drawn."""
    if family is None:
        names = list(FAMILIES)
        shares = [share for _, share in FAMILIES.values()]
        family = str(frame.random.choice(names, p=[share / sum(shares) for share in shares]))
    return FAMILIES[family][0](frame)
