"""The adapter moves source rows as a flow does, alone and inside a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.integrations.sklearn import TransportAdapter

DRAW = np.random.default_rng(0)
Y = np.tile([0, 1], 40)
SOURCE = DRAW.normal(size=(80, 3)) + 3 * Y[:, None]
# The target is the same, moved by more than half of what separates its classes.
TARGET = DRAW.normal(size=(80, 3)) + 3 * Y[:, None] + 2.5
X = np.concatenate([SOURCE, TARGET])
LABELS = np.concatenate([Y, Y])
DOMAIN = np.repeat([1, -2], 80)


def _fitted(**settings) -> TransportAdapter:
    return TransportAdapter(epsilon=0.5, steps=5, **settings).fit(X, LABELS, sample_domain=DOMAIN)


@pytest.mark.parametrize("labels", ["none", "gaussian"])
def test_it_moves_as_the_flow_and_its_nearest_map_do(labels):
    adapter = _fitted(labels=labels)
    source, target = (SOURCE, TARGET) if labels == "none" else ((SOURCE, Y), (TARGET, Y))
    moves = otdd.Flow(steps=5, stepping=otdd.Stepping(0.2))
    flow = otdd.gradient_flow(source, target, moves, epsilon=0.5, labels=labels)
    new = SOURCE[:7] + 0.01
    moved = flow.map("nearest")(otdd.LabeledSamples(torch.tensor(new), None, ()))
    np.testing.assert_allclose(adapter.transform(new), moved.features.numpy(), rtol=1e-6)
    assert adapter.flow_.after.divergence < adapter.flow_.before.divergence


def test_rows_keep_their_order_type_and_number():
    moved = _fitted().transform(SOURCE[[5, 2]].astype(np.float32))
    assert moved.dtype == np.float32
    np.testing.assert_allclose(moved, _fitted().transform(SOURCE)[[5, 2]], rtol=1e-5)


def test_in_a_pipeline_earlier_steps_act_on_both_domains():
    pipeline = make_pipeline(StandardScaler(), TransportAdapter(epsilon=0.05, steps=10))
    pipeline.fit(X, LABELS, transportadapter__sample_domain=DOMAIN)
    moved = pipeline.transform(SOURCE)
    scaled = StandardScaler().fit(X)
    alone = TransportAdapter(epsilon=0.05, steps=10)
    alone.fit(scaled.transform(X), sample_domain=DOMAIN)
    np.testing.assert_allclose(moved, alone.transform(scaled.transform(SOURCE)), rtol=1e-5)
    # What it is for: trained on moved rows, a classifier reads the target.
    target = scaled.transform(TARGET)
    before = LogisticRegression().fit(scaled.transform(SOURCE), Y).score(target, Y)
    after = LogisticRegression().fit(moved, Y).score(target, Y)
    assert after > before + 0.1


def test_settings_are_those_of_an_estimator():
    adapter = clone(TransportAdapter(steps=3))
    assert adapter.get_params()["steps"] == 3
    with pytest.raises(NotFittedError):
        adapter.transform(SOURCE)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, {}, "fit needs sample_domain"),
        ({}, {"sample_domain": DOMAIN[:3]}, r"sample_domain must be \(160,\), got \(3,\)"),
        ({}, {"sample_domain": np.ones(160)}, r"no row of the target \(< 0\)"),
        ({}, {"sample_domain": -np.ones(160)}, r"no row of the source \(>= 0\)"),
        ({}, {"sample_domain": np.where(LABELS == 1, np.nan, 1.0)}, "got NaN at rows "),
        ({}, {"sample_domain": DOMAIN > 0}, "must be numbers, >= 0 source, < 0 target, got bool"),
        ({"labels": "gaussian"}, {"sample_domain": DOMAIN}, "fit needs y of all rows"),
        ({"epsilon": 1.0, "epsilon_relative": 1.0}, {"sample_domain": DOMAIN}, "got both"),
    ],
)
def test_domains_that_say_nothing_are_refused(settings, arguments, message):
    with pytest.raises(InputError, match=message):
        TransportAdapter(**settings).fit(X, **arguments)


def test_another_number_of_features_is_refused():
    with pytest.raises(ValueError, match="features"):
        _fitted().transform(SOURCE[:, :2])
