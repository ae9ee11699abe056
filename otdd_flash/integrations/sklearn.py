"""A scikit-learn transformer that moves a source domain onto a target domain.

`TransportAdapter` is public; nothing in this package imports it. `fit` calls `gradient_flow`
(`flows.run`), and `transform` moves rows as their nearest source rows. The class follows
scikit-learn's rules, on which pipelines and searches rely: the constructor only stores its
arguments, attributes set by `fit` end in an underscore, and rows keep their order, type and feature
names.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from otdd_flash.errors import InputError
from otdd_flash.flows.flow import Flow
from otdd_flash.flows.run import gradient_flow
from otdd_flash.flows.stepping import Stepping
from otdd_flash.raw_labels import raw_values, rows_shown
from otdd_flash.real_numbers import LARGEST_IN_DOUBLE, in_double, real_tensor
from otdd_flash.samples import LabeledSamples


class TransportAdapter(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer that moves rows of a source domain along a gradient flow to a target domain.

    X holds both domains, distinguished by `sample_domain`, so that earlier steps of a pipeline act
    on both. By default the flow matches features alone and y is not read; with `labels` it also
    matches classes, for which y of the target rows must be known. `transform` moves any rows as the
    nearest source row of `fit` was moved, without regard to labels, as `FlowResult.map("nearest")`
    does with unlabelled rows. Features keep their names and order: after
    `set_output(transform="pandas")` rows are returned as a table like the given one.

    Args:
        steps: number of steps of the flow.
        step_size: share of its way to the target that a row moves in a step.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at the start; instead of
            `epsilon`. Neither given means 0.01 of that mean.
        labels: how classes are compared, such as "gaussian"; "none" does not read y.

    Attributes:
        flow_: the `FlowResult`, with the distance before and after and its solver bounds.
        n_features_in_: number of features seen by `fit`.
        feature_names_in_: their names, if `fit` was given a table.
    """

    def __init__(
        self,
        steps: int = 10,
        step_size: float = 0.2,
        epsilon: float | None = None,
        epsilon_relative: float | None = None,
        labels: Any = "none",
    ) -> None:
        self.steps = steps
        self.step_size = step_size
        self.epsilon = epsilon
        self.epsilon_relative = epsilon_relative
        self.labels = labels

    def fit(self, X: ArrayLike, y: Any = None, sample_domain: ArrayLike | None = None) -> Self:
        """Compute the flow that moves the source's rows.

        Args:
            X: (n, d) rows of both domains.
            y: (n,) classes of all rows, read unless `labels` is "none".
            sample_domain: (n,) numbers: >= 0 is the source, < 0 the target.

        Raises:
            InputError: no domains, one without rows, or labels that are needed and missing.
        """
        rows = self._rows(X, reset=True)
        if sample_domain is None:
            raise InputError(
                "fit needs sample_domain, one number for each row: >= 0 source, < 0 target"
            )
        domain = np.asarray(sample_domain)
        if domain.shape != (len(rows),):
            raise InputError(f"sample_domain must be ({len(rows)},), got {domain.shape}")
        if domain.dtype.kind not in "iuf" or (missing := np.isnan(domain)).any():
            known = domain.dtype if domain.dtype.kind not in "iuf" else f"NaN {rows_shown(missing)}"
            raise InputError(f"sample_domain must be numbers, >= 0 source, < 0 target, got {known}")
        source = domain >= 0
        if source.all() or not source.any():
            side = "target (< 0)" if source.all() else "source (>= 0)"
            raise InputError(f"sample_domain names no row of the {side}")
        self.flow_ = gradient_flow(
            self._samples(rows, y, source, "source"),
            self._samples(rows, y, ~source, "target"),
            Flow(steps=self.steps, stepping=Stepping(self.step_size)),
            epsilon=self.epsilon,
            epsilon_relative=self.epsilon_relative,
            labels=self.labels,
        )
        return self

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Move rows (k, d) as the nearest source row moved; row i of the result is row i of X."""
        check_is_fitted(self, "flow_")
        rows = self._rows(X, reset=False)
        moved = self.flow_.map("nearest")(LabeledSamples.of(rows, "samples"))
        return np.asarray(moved.features.cpu().numpy(), dtype=rows.dtype)

    def _samples(
        self, rows: NDArray[Any], y: Any, chosen: NDArray[np.bool_], name: str
    ) -> LabeledSamples:
        if self.labels == "none":
            return LabeledSamples.of(rows[chosen], name)
        if y is None:
            raise InputError(f"labels={self.labels!r} compares classes: fit needs y of all rows")
        return LabeledSamples.from_arrays(rows[chosen], raw_values(y)[chosen], name=name)

    def _rows(self, X: ArrayLike, *, reset: bool) -> NDArray[Any]:
        checked = validate_data(self, X, dtype=[np.float64, np.float32], reset=reset)
        rows = np.asarray(checked)
        if (np.abs(rows) >= LARGEST_IN_DOUBLE).any():
            # They may have been integers, which scikit-learn converted to floats.
            in_double("X", real_tensor("X", X))
        return rows
