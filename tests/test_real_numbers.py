"""Arrays of every kind are the numbers that they hold, or are refused in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import InputError
from otdd_flash.real_numbers import real_tensor

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(30, 4)), DRAW.normal(size=(25, 4)) + 1
KINDS_X, KINDS_Y = np.arange(30) % 3, np.arange(25) % 2


def read_only(x: Any) -> Any:
    x = x.copy()
    x.setflags(write=False)
    return x


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: x.astype(np.longdouble),
        lambda x: np.asfortranarray(x),
        read_only,
        lambda x: np.ma.masked_array(x, np.zeros_like(x, bool)),
        pd.DataFrame,
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: torch.nn.Parameter(torch.tensor(x)),
    ],
    ids=[
        *("turned twice", "of the other byte order", "long", "by columns", "read-only"),
        *("nothing masked", "a table", "with a gradient", "a parameter"),
    ],
)
def test_the_same_numbers_in_another_array_are_at_the_same_distance(changed: Any) -> None:
    expected = otdd.dataset_distance((X, KINDS_X), (Y, KINDS_Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = otdd.dataset_distance((changed(X), KINDS_X), (Y, KINDS_Y))
    assert found.value == expected.value
    assert found.bounds == expected.bounds


def test_rows_from_the_end_are_those_rows() -> None:
    assert torch.equal(real_tensor("x", X[::-1]), torch.from_numpy(X.copy()).flip(0))


MASKED = np.ma.masked_array(X, np.zeros_like(X, bool))
MASKED[3, 1] = np.ma.masked


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (MASKED, KINDS_X, "features are masked at row 3; leave those rows out, or fill them"),
        (X, np.ma.masked_array(KINDS_X, KINDS_X == 1), "10 labels are missing, at rows 1, 4,"),
        (X, np.array([b"a", b"\xff", b"b"])[KINDS_X], r"text in UTF-8, got b'\\xff'; decode"),
        (X.tolist(), KINDS_X, "features must be an array or a tensor, got list of 30 items"),
    ],
)
def test_what_is_not_there_or_no_array_is_not_read_as_numbers(
    features: Any, labels: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance((features, labels), (Y, KINDS_Y))


def test_masked_weights_are_refused() -> None:
    weights = np.ma.masked_array(np.ones(30), KINDS_X == 2)
    with pytest.raises(InputError, match="weights are masked at rows 2, 5, 8, 11, 14 and 5 more"):
        otdd.LabeledSamples.from_arrays(X, KINDS_X, weights)


@pytest.mark.parametrize("kind", ["i8", "u8", "i4"])
def test_large_integers_keep_their_differences(kind: str) -> None:
    """Beyond 2^24 float32 holds every second integer at best: clouds met in one point."""
    x, y = (np.round(10 * (points + 5)).astype(kind) for points in (X, Y))
    expected = otdd.dataset_distance((x, KINDS_X), (y, KINDS_Y), compute=double())
    far = x.dtype.type(1 << 30)
    found = otdd.dataset_distance((x + far, KINDS_X), (y + far, KINDS_Y), compute=double())
    assert found.value == pytest.approx(expected.value, rel=1e-3)
    small = otdd.LabeledSamples.from_arrays(x, KINDS_X)
    assert small.features.dtype == torch.float32


def array_dataset(values: Any) -> LabeledDataset:
    return LabeledDataset(values, None, (), None, "array", "values")


def double() -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", precision="double")


def test_results_of_samples_have_no_gradient() -> None:
    x = torch.tensor(X, requires_grad=True)
    result = otdd.dataset_distance((x, KINDS_X), (Y, KINDS_Y))
    assert not result.source.features.requires_grad
    assert not otdd.sliced_distances([(x, KINDS_X), (Y, KINDS_Y)]).values.requires_grad
    assert not otdd.extractors.standardize((x, KINDS_X), (Y, KINDS_Y))[0].features.requires_grad


def test_large_integers_of_a_file_keep_their_differences(tmp_path: Path) -> None:
    """Such as seconds since 1970."""
    times = np.arange(40)[:, None] + np.array([1_700_000_000, 0])
    np.savez(tmp_path / "x.npz", x=times, y=np.arange(40) % 2)
    dataset = otdd.load("arrays", path=str(tmp_path / "x.npz"))
    found = otdd.embed(dataset, otdd.extractors.identity(), batch_size=7)
    assert torch.equal(found.features, torch.from_numpy(times).double())


@pytest.mark.parametrize(
    "extractor", [otdd.extractors.identity(), otdd.extractors.from_callable(lambda batch: batch)]
)
def test_large_integers_of_an_extractor_are_refused(extractor: Any) -> None:
    """The type of all features is that of the first batch, which may hold small ones."""
    values = np.array([[1], [2], [1 << 24], [(1 << 24) + 1]])
    assert len(otdd.embed(array_dataset(values[:3]), extractor)) == 3
    with pytest.raises(InputError, match=r"integers up to 16777217, .* float64"):
        otdd.embed(array_dataset(values), extractor, batch_size=1)


def test_what_a_function_returns_and_a_plan_takes_is_read_as_features_are() -> None:
    dataset = array_dataset(X)
    turned = otdd.extractors.from_callable(lambda batch: batch[:, ::-1])
    assert torch.equal(otdd.embed(dataset, turned).features, torch.from_numpy(X.copy()).flip(1))
    masking = otdd.extractors.from_callable(lambda batch: np.ma.masked_less(batch, 0))
    with pytest.raises(InputError, match=r"features .* are masked at rows 0, "):
        otdd.embed(dataset, masking)
    result = otdd.dataset_distance((X, KINDS_X), (Y, KINDS_Y))
    assert torch.equal(result.apply_plan(Y[::-1]), result.apply_plan(Y[::-1].copy()))


EVEN, ODD = 1 << 60, (1 << 60) + 1


def int64(values: Any) -> Any:
    return np.array(values, np.int64)


def nullable(dtype: str) -> Callable[[Any], pd.DataFrame]:
    return lambda rows: pd.DataFrame({"a": pd.array([row[0] for row in rows], dtype)})


# What holds integers of one column, [[ODD], [1]], as nothing in floating point does.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "int64": int64,
    "uint64": lambda rows: np.array(rows, np.uint64),
    "long long": lambda rows: np.array(rows, np.longlong),
    "the other byte order": lambda rows: np.array(rows, np.dtype(np.int64).newbyteorder()),
    "a tensor": torch.tensor,
    "an unsigned tensor": lambda rows: torch.tensor(rows, dtype=torch.uint64),
    "longdouble": lambda rows: int64(rows).astype(np.longdouble),
    "lists": lambda rows: rows,
    "lists with a fraction": lambda rows: [*rows, [0.5]],
    "objects": lambda rows: np.array(rows, object),
    "decimals": lambda rows: [[Decimal(value) for value in row] for row in rows],
    "NumPy's numbers": lambda rows: [[np.int64(row[0])] for row in rows] + [[np.half(1)]],
    "fractions": lambda rows: [[Fraction(value) for value in row] for row in rows],
    "objects of longdouble": lambda rows: np.array([[np.longdouble(ODD - 1) + 1]], object),
    "a table": lambda rows: pd.DataFrame({"a": int64(rows)[:, 0], "b": [0.5] * len(rows)}),
    "a nullable table": nullable("Int64"),
    "an Arrow-backed table": nullable("int64[pyarrow]"),
    "categories": lambda rows: pd.DataFrame({"a": pd.Categorical([row[0] for row in rows])}),
    "an Arrow table": lambda rows: pa.table({"a": [row[0] for row in rows]}),
    "an Arrow column of lists": lambda rows: pa.chunked_array([rows]),
}


@pytest.mark.parametrize("held", HOLDERS)
def test_integers_that_float64_rounds_are_refused_whatever_holds_them(held: str) -> None:
    """[[2^60 + 1]] and [[2^60]] were at 0 +- 3e-15, at a cost of 0.5."""
    shown = r"1\.152921504606846977e\+18" if "longdouble" in held else ODD
    with pytest.raises(InputError, match=rf"float64 holds, got {shown} at row 0"):
        otdd.LabeledSamples(HOLDERS[held]([[ODD], [1]]), None, ())
    if "objects of" not in held:
        kept = otdd.LabeledSamples(HOLDERS[held]([[EVEN], [1]]), None, ()).features
        assert kept[0, 0].item() == EVEN
        close = otdd.LabeledSamples(HOLDERS[held]([[(1 << 24) + 1], [1]]), None, ()).features
        assert close[0, 0].item() == (1 << 24) + 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1 << 70 | 1]], "got 1180591620717411303425 at row 0"),
        ([[10**400]], r"got 1000000.*… \(401 characters\) at row 0"),
        ([[(1 << 63) + 1], [-1]], "got 9223372036854775809 at row 0"),
        (np.array([[np.iinfo(np.int64).max]]), "got 9223372036854775807 at row 0"),
        (np.array([[np.iinfo(np.uint64).max]]), "got 18446744073709551615 at row 0"),
        (np.ones((1, 1), np.longdouble) / 3, "got 0.33333333333333333334 at row 0"),
        ([[Decimal(2**53) + Decimal("0.5")]], "got 9007199254740992.5 at row 0"),
        ([["1"]], "must be real numbers, got list of 1 items"),
        ([[1], [2, 3]], "must be real numbers, got list of 2 items"),
        (pd.DataFrame({"a": pd.to_timedelta(["1D"])}), "and column 'a' holds .*; leave it out"),
        (pd.DataFrame({"a": [1.0], "b": ["x"]}), "and column 'b' holds 'x'; leave it out"),
    ],
)
def test_numbers_that_are_not_held_are_refused(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        otdd.LabeledSamples(values, None, ())


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ([[1 << 70]], 2.0**70),
        ([[0.1]], 0.1),
        ([[Decimal("0.1")]], 0.1),
        ([[Fraction(1, 3)]], 1 / 3),
        (np.array([[1 << 63]], np.uint64), 2.0**63),
        (pa.table({"a": pa.array([Decimal("0.10")])}), 0.1),
        (pa.array([[0.1]], pa.list_(pa.float64(), 1)), 0.1),
        (pd.DataFrame({"a": pd.arrays.SparseArray([0.1, 0])}), 0.1),
    ],
)
def test_numbers_of_any_container_are_those_of_float64(given: Any, value: float) -> None:
    assert otdd.LabeledSamples(given, None, ()).features[0, 0].item() == value


@pytest.mark.parametrize("base", [1 << 24, 1 << 31, 1 << 52])
@pytest.mark.parametrize("precision", ["fast", "double"])
def test_costs_of_integers_are_within_their_bounds(base: int, precision: str) -> None:
    """Up to 2^53 they are exact, whatever the precision of the solve."""
    x, y = np.array([[base + 1, base + 3]]), np.array([[base, base - 1]])
    compute = otdd.ComputeOptions("cpu", precision=precision)
    found = otdd.sinkhorn(x, y, epsilon=1.0, compute=compute)
    assert found.bounds[0] <= (1 + 16) / 2 <= found.bounds[1]
    assert found.value == pytest.approx(8.5, rel=1e-6)
    # In float32 clouds of such numbers met in one point.
    loss = otdd.sinkhorn_loss(torch.tensor(x), torch.tensor(y), epsilon=1.0, debias=False)
    assert float(loss) == pytest.approx(8.5, rel=1e-6)


@pytest.mark.parametrize("half", [Decimal("0.5"), Fraction(1, 2), np.longdouble(0.5)])
def test_an_epsilon_is_any_real_number(half: Any) -> None:
    x, y = torch.tensor(X), torch.tensor(Y)
    expected = otdd.sinkhorn_loss(x, y, epsilon=0.5)
    assert torch.equal(otdd.sinkhorn_loss(x, y, epsilon=half), expected)
    for beyond in (Decimal("sNaN"), Decimal("Infinity"), 10**400):
        with pytest.raises(InputError, match="epsilon must be positive and finite, got"):
            otdd.sinkhorn_loss(x, y, epsilon=beyond)


def blocks_of(costs: Any) -> otdd.CostBlocks:
    return otdd.CostBlocks(1, 2, lambda rows, columns: costs[rows, columns])


BIG = torch.tensor([[ODD, EVEN]])
POINT = torch.zeros(2, 1)
ENTRIES: dict[str, Callable[[], Any]] = {
    "a loss": lambda: otdd.sinkhorn_loss(BIG.T, BIG.T, epsilon=1.0),
    "losses": lambda: otdd.sinkhorn_losses([BIG.T], [BIG.T], epsilon=1.0),
    "masses": lambda: otdd.sinkhorn_loss(POINT, POINT, BIG[0], epsilon=1.0),
    "weights": lambda: otdd.LabeledSamples.from_arrays(POINT, [0, 1], BIG[0]),
    "weights of a dataset": lambda: array_dataset(X[:2]).weighted([ODD, 1]),
    "costs": lambda: otdd.matrix_transport(BIG.numpy(), epsilon=1e17),
    "unsigned costs": lambda: otdd.matrix_transport(BIG.numpy().astype("u8"), epsilon=1e17),
    "blocks of costs": lambda: otdd.matrix_transport(blocks_of(BIG), epsilon=1e17),
    "a loss of costs": lambda: otdd.matrix_loss(BIG, epsilon=1e17),
    "class distances": lambda: otdd.ClassDistances([[0]], [[ODD]], [[0]]),
    "joint class distances": lambda: otdd.JointClassDistances(
        [[ODD, 0], [0, 0]], ("x", "y"), (("a",), ("b",))
    ),
    "a table": lambda: otdd.sinkhorn_loss(
        POINT, POINT, epsilon=1.0, labels_x=torch.zeros(2), labels_y=torch.zeros(2),
        class_table=torch.tensor([[0, ODD], [ODD, 0]]),
    ),
    "pairs": lambda: otdd.pairwise_distances([BIG.T.numpy()] * 2, labels="none"),
    "a flow": lambda: otdd.gradient_flow(BIG.T.numpy(), BIG.T.numpy(), epsilon=1.0),
    "sliced": lambda: otdd.sliced_distances([(BIG.T.numpy(), np.arange(2))] * 2),
    "an extractor": lambda: otdd.embed(array_dataset([[ODD], [0.5]]), otdd.extractors.identity()),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_refuses_integers_that_float64_rounds(entry: str) -> None:
    with pytest.raises(InputError, match=rf"float64 holds, got {ODD} at row 0"):
        ENTRIES[entry]()


def test_a_later_batch_of_longer_numbers_makes_all_of_them_longer() -> None:
    """The features of a batch of integers are float32, and 0.1 would be rounded beside them."""
    found = otdd.embed(array_dataset([[1], [0.1]]), otdd.extractors.identity(), batch_size=1)
    assert found.features.tolist() == [[1.0], [0.1]]


TABLE = pd.DataFrame(
    {
        "count": pd.array([1, 2, 3, 4], "Int64"),
        "share": pd.array([0.5, 1, 2, 3], "Float64"),
        "flag": pd.array([True, False, True, False], "boolean"),
        "arrow": pd.array([4, 3, 2, 1], "int64[pyarrow]"),
    }
)
KINDS = {
    "string": pd.Series(["a", "b", "a", "b"], dtype="string"),
    "Arrow's string": pd.Series(["a", "b", "a", "b"], dtype=pd.ArrowDtype(pa.string())),
    "categories": pd.Series(["a", "b", "a", "b"], dtype="category"),
    "an Arrow array": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_nullable_columns_are_datasets(kind: str) -> None:
    plain = np.array([[1, 0.5, 1, 4], [2, 1, 0, 3], [3, 2, 1, 2], [4, 3, 0, 1]])
    expected = otdd.LabeledSamples.from_arrays(plain, ["a", "b", "a", "b"])
    for table in (TABLE, pa.Table.from_pandas(TABLE)):
        found = otdd.LabeledSamples.from_arrays(table, KINDS[kind])
        assert found.fingerprint == expected.fingerprint
        weights = pd.Series([1, 1, 2, 4], dtype="UInt8")
        weighted = otdd.LabeledSamples.from_arrays(table, KINDS[kind], weights)
        assert weighted.masses.tolist() == [0.125, 0.125, 0.25, 0.5]
        assert otdd.dataset_distance((table, KINDS[kind]), (plain, KINDS["string"])).value == 0


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("features", TABLE.mask(TABLE == 3), "are missing at row 2 in column 'count'; leave"),
        ("features", TABLE.astype("float64").mask(TABLE == 3), "at row 2 in column 'count'"),
        ("features", pa.table({"a": [1, None, 2, None]}), "at rows 1, 3 in column 'a'"),
        (
            "features",
            pa.array([[1, 2], [1, None], [1, 2], None]),
            "are missing at rows 1, 3; leave",
        ),
        ("features", np.array([[1], [None], [1], [2]]), "are missing at row 1; leave"),
        (
            "labels",
            pd.Series(["a", None, "b", "b"], dtype="string"),
            "1 label is missing, at row 1",
        ),
        ("labels", pd.Series([1, None, 2, 2], dtype="category"), "1 label is missing, at row 1"),
        ("labels", pa.array([1, 2, None, 2]), "1 label is missing, at row 2"),
        ("weights", pd.Series([1, None, 2, 2], dtype="Int64"), "weights .* missing at row 1;"),
        ("weights", [1, None, 2, 2], "weights .* missing at row 1;"),
    ],
)
def test_what_a_table_lacks_is_named(part: str, value: Any, message: str) -> None:
    parts = {"features": TABLE, "labels": KINDS["string"], "weights": None, part: value}
    with pytest.raises(InputError, match=message):
        otdd.LabeledSamples.from_arrays(**parts)
