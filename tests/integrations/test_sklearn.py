"""The adapter moves source rows as a flow does, alone and inside a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from refusals import naming

import otdd_flash as otdd
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from otdd_flash.integrations.sklearn import TransportAdapter

DRAW = np.random.default_rng(0)
Y = np.tile([0, 1], 20)
SOURCE = DRAW.normal(size=(40, 3)) + 3 * Y[:, None]
# The target is the same, moved by more than half of what separates its classes.
TARGET = DRAW.normal(size=(40, 3)) + 3 * Y[:, None] + 2.5
X = np.concatenate([SOURCE, TARGET])
LABELS = np.concatenate([Y, Y])
DOMAIN = np.repeat([1, -2], 40)


def _adapter(**settings: Any) -> TransportAdapter:
    # Imported here: scikit-learn takes a second, and is not needed to list these tests.
    from otdd_flash.integrations.sklearn import TransportAdapter

    return TransportAdapter(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["none", "gaussian"])
def test_it_moves_as_the_flow_and_its_nearest_map_do(labels):
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError

    adapter = clone(_adapter(epsilon=2.0, steps=3, labels=labels))
    assert adapter.get_params()["steps"] == 3
    with pytest.raises(NotFittedError):
        adapter.transform(SOURCE)
    adapter.fit(X, LABELS, sample_domain=DOMAIN)
    source, target = (SOURCE, TARGET) if labels == "none" else ((SOURCE, Y), (TARGET, Y))
    moves = otdd.Flow(steps=3, stepping=otdd.Stepping(0.2))
    flow = otdd.gradient_flow(source, target, moves, epsilon=2.0, labels=labels)
    new = SOURCE[:7] + 0.01
    moved = flow.map("nearest")(otdd.LabeledSamples(torch.tensor(new), None, ()))
    np.testing.assert_allclose(adapter.transform(new), moved.features.numpy(), rtol=1e-6)
    assert adapter.flow_.after.divergence < adapter.flow_.before.divergence
    # Rows keep their order, type and number.
    moved = adapter.transform(SOURCE[[5, 2]].astype(np.float32))
    assert moved.dtype == np.float32
    np.testing.assert_allclose(moved, adapter.transform(SOURCE)[[5, 2]], rtol=1e-5)
    with pytest.raises(ValueError, match="features"):
        adapter.transform(SOURCE[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize("check", ["set_output_transform", "transformer_get_feature_names_out"])
def test_it_keeps_what_scikit_learn_asks_of_transformers(check):
    from sklearn.utils import estimator_checks

    from otdd_flash.integrations.sklearn import TransportAdapter

    class Halves(TransportAdapter):
        """With every second row in the target, for checks that know X and y alone."""

        def fit(self, X, y=None):
            return super().fit(X, y, sample_domain=np.where(np.arange(len(X)) % 2, -1, 1))

    getattr(estimator_checks, f"check_{check}")("Halves", Halves(steps=1, epsilon=5.0))


@pytest.mark.slow
def test_in_a_pipeline_of_tables_earlier_steps_act_on_both_domains():
    import pandas
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = pandas.DataFrame(X, columns=["width", "height", "depth"])
    adapter = _adapter(epsilon=0.5, steps=5).set_output(transform="pandas")
    pipeline = make_pipeline(StandardScaler().set_output(transform="pandas"), adapter)
    pipeline.fit(table, LABELS, transportadapter__sample_domain=DOMAIN)
    moved = pipeline.transform(table[7:12])
    assert list(moved.columns) == list(table.columns) == list(pipeline.get_feature_names_out())
    assert list(moved.index) == [7, 8, 9, 10, 11]
    scaled = StandardScaler().fit(X)
    alone = _adapter(epsilon=0.5, steps=5).fit(scaled.transform(X), sample_domain=DOMAIN)
    expected = alone.transform(scaled.transform(SOURCE))
    assert isinstance(expected, np.ndarray)
    np.testing.assert_allclose(moved.to_numpy(), expected[7:12], rtol=1e-5)
    # What it is for: trained on moved rows, a classifier reads the target.
    target = scaled.transform(TARGET)
    before = LogisticRegression().fit(scaled.transform(SOURCE), Y).score(target, Y)
    assert LogisticRegression().fit(expected, Y).score(target, Y) > before + 0.1


REFUSED = [
    ({}, {}, "fit needs sample_domain"),
    ({}, {"sample_domain": DOMAIN[:3]}, r"sample_domain must be \(80,\), got \(3,\)"),
    ({}, {"sample_domain": np.ones(80)}, r"no row of the target \(< 0\)"),
    ({}, {"sample_domain": -np.ones(80)}, r"no row of the source \(>= 0\)"),
    ({}, {"sample_domain": np.where(LABELS == 1, np.nan, 1.0)}, "got NaN at rows "),
    ({}, {"sample_domain": DOMAIN > 0}, "must be numbers, >= 0 source, < 0 target, got bool"),
    ({"labels": "gaussian"}, {"sample_domain": DOMAIN}, "fit needs y of all rows"),
    ({"epsilon": 1.0, "epsilon_relative": 1.0}, {"sample_domain": DOMAIN}, "got both"),
]


def test_domains_that_say_nothing_are_refused():
    for settings, arguments, message in REFUSED:
        with naming(message), pytest.raises(InputError, match=message):
            _adapter(**settings).fit(X, **arguments)
