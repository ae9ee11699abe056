"""Arrays of every kind are the numbers that they hold, or are refused in a sentence."""

from __future__ import annotations

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
from safetensors.torch import save_file

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import InputError
from otdd_flash.features import file_features

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(16, 4)), DRAW.normal(size=(14, 4)) + 1
KINDS_X, KINDS_Y = np.arange(16) % 3, np.arange(14) % 2
DOUBLE = otdd.ComputeOptions("cpu", precision="double")


def test_large_integers_keep_their_differences() -> None:
    """Beyond 2^24 float32 holds every second integer at best: clouds met in one point."""
    x, y = (np.round(3 * (points + 5)).astype("u8") for points in (X, Y))
    expected = otdd.dataset_distance((x, KINDS_X), (y, KINDS_Y), compute=DOUBLE)
    far = x.dtype.type(1 << 30)
    found = otdd.dataset_distance((x + far, KINDS_X), (y + far, KINDS_Y), compute=DOUBLE)
    assert found.value == pytest.approx(expected.value, rel=1e-3)
    small = otdd.LabeledSamples.from_arrays(x, KINDS_X)
    assert small.features.dtype == torch.float32


def array_dataset(values: Any) -> LabeledDataset:
    return LabeledDataset(values, None, (), None, "array", "values")


@pytest.mark.parametrize(
    "extractor", [otdd.extractors.identity(), otdd.extractors.from_callable(lambda batch: batch)]
)
def test_large_integers_of_an_extractor_are_refused(extractor: Any) -> None:
    """The type of all features is that of the first batch, which may hold small ones."""
    values = np.array([[1], [2], [1 << 24], [(1 << 24) + 1]])
    assert len(otdd.embed(array_dataset(values[:3]), extractor)) == 3
    with pytest.raises(InputError, match=r"integers up to 16777217, .* float64"):
        otdd.embed(array_dataset(values), extractor, batch_size=1)


EVEN, ODD = 1 << 60, (1 << 60) + 1


def int64(values: Any) -> Any:
    return np.array(values, np.int64)


def nullable(dtype: str) -> Callable[[Any], pd.DataFrame]:
    return lambda rows: pd.DataFrame({"a": pd.array([row[0] for row in rows], dtype)})


# What holds integers of one column, [[ODD], [1]], as nothing in floating point does.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "int64": int64,
    "uint64": lambda rows: np.array(rows, np.uint64),
    "the other byte order": lambda rows: np.array(rows, np.dtype(np.int64).newbyteorder()),
    "an unsigned tensor": lambda rows: torch.tensor(rows, dtype=torch.uint64),
    "longdouble": lambda rows: int64(rows).astype(np.longdouble),
    "lists with a fraction": lambda rows: [*rows, [0.5]],
    "objects": lambda rows: np.array(rows, object),
    "decimals": lambda rows: [[Decimal(value) for value in row] for row in rows],
    "NumPy's numbers": lambda rows: [[np.int64(row[0])] for row in rows] + [[np.half(1)]],
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
    for whole in (EVEN, (1 << 24) + 1):
        kept = otdd.LabeledSamples(HOLDERS[held]([[whole], [1]]), None, ())
        assert kept.features[0, 0].item() == whole
        again = otdd.LabeledSamples(kept.features.double().numpy().copy(), None, ())
        assert kept.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ([[1 << 70]], 2.0**70),
        ([[Fraction(1, 3)]], 1 / 3),
        (pa.table({"a": pa.array([Decimal("0.10")])}), 0.1),
        (pa.array([[0.1]], pa.list_(pa.float64(), 1)), 0.1),
        (pd.DataFrame({"a": pd.arrays.SparseArray([0.1, 0])}), 0.1),
    ],
)
def test_numbers_of_any_container_are_those_of_float64(given: Any, value: float) -> None:
    assert otdd.LabeledSamples(given, None, ()).features[0, 0].item() == value


@pytest.mark.parametrize("base", [1 << 24, 1 << 52])
def test_costs_of_integers_are_within_their_bounds(base: int) -> None:
    """Up to 2^53 they are exact, whatever the precision of the solve."""
    x, y = np.array([[base + 1, base + 3]]), np.array([[base, base - 1]])
    found = otdd.sinkhorn(x, y, epsilon=1.0, compute="cpu")
    assert found.bounds[0] <= (1 + 16) / 2 <= found.bounds[1]
    assert found.value == pytest.approx(8.5, rel=1e-6)
    # In float32 clouds of such numbers met in one point.
    loss = otdd.sinkhorn_loss(torch.tensor(x), torch.tensor(y), epsilon=1.0, debias=False)
    assert float(loss) == pytest.approx(8.5, rel=1e-6)


def test_an_epsilon_is_any_real_number() -> None:
    x, y = torch.tensor(X), torch.tensor(Y)
    expected = otdd.sinkhorn_loss(x, y, epsilon=5.0)
    for five in (Decimal("5"), Fraction(10, 2), np.longdouble(5)):
        assert torch.equal(otdd.sinkhorn_loss(x, y, epsilon=five), expected), five
    for beyond in (Decimal("sNaN"), Decimal("Infinity"), 10**400):
        with pytest.raises(InputError, match="epsilon must be positive and finite, got"):
            otdd.sinkhorn_loss(x, y, epsilon=beyond)


def blocks_of(costs: Any) -> otdd.CostBlocks:
    return otdd.CostBlocks(1, 2, lambda rows, columns: costs[rows, columns])


BIG = torch.tensor([[ODD, EVEN]])
POINT = torch.zeros(2, 1)
ENTRIES: dict[str, Callable[[], Any]] = {
    "a loss": lambda: otdd.sinkhorn_loss(BIG.T, BIG.T, epsilon=1.0),
    "masses": lambda: otdd.sinkhorn_loss(POINT, POINT, BIG[0], epsilon=1.0),
    "weights": lambda: otdd.LabeledSamples.from_arrays(POINT, [0, 1], BIG[0]),
    "weights of a dataset": lambda: array_dataset(X[:2]).weighted([ODD, 1]),
    "costs": lambda: otdd.matrix_transport(BIG.numpy(), epsilon=1e17),
    "blocks of costs": lambda: otdd.matrix_transport(blocks_of(BIG), epsilon=1e17),
    "class distances": lambda: otdd.ClassDistances([[0]], [[ODD]], [[0]]),
    "pairs": lambda: otdd.pairwise_distances([BIG.T.numpy()] * 2, labels="none"),
    "a flow": lambda: otdd.gradient_flow(BIG.T.numpy(), BIG.T.numpy(), epsilon=1.0),
    "an extractor": lambda: otdd.embed(array_dataset([[ODD], [0.5]]), otdd.extractors.identity()),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_refuses_integers_that_float64_rounds(entry: str) -> None:
    with pytest.raises(InputError, match=rf"float64 holds, got {ODD} at row 0"):
        ENTRIES[entry]()


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


def test_tables_of_nullable_columns_are_datasets() -> None:
    plain = np.array([[1, 0.5, 1, 4], [2, 1, 0, 3], [3, 2, 1, 2], [4, 3, 0, 1]])
    weights = pd.Series([1, 1, 2, 4], dtype="UInt8")
    expected = otdd.LabeledSamples.from_arrays(plain, ["a", "b", "a", "b"], [1, 1, 2, 4])
    for name, kinds in KINDS.items():
        for table in (TABLE, pa.Table.from_pandas(TABLE)):
            found = otdd.LabeledSamples.from_arrays(table, kinds, weights)
            assert found.fingerprint == expected.fingerprint, (name, type(table))
    found = otdd.dataset_distance((TABLE, KINDS["categories"]), (plain, KINDS["string"]))
    assert found.value == 0


HALF = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).half().numpy()
LABELS, WEIGHTS = np.arange(50) % 4, np.arange(1, 51)


def in_file(name: str, write: Callable[[Path], None], folder: Path) -> Any:
    write(folder / name)
    return otdd.features_file(folder / name)


# The same numbers, which float16 holds.
HELD: dict[str, Callable[[Path], Any]] = {
    "float64": lambda _: HALF.astype(np.float64),
    "the other byte order": lambda _: HALF.astype(np.dtype(np.float64).newbyteorder()),
    "by columns": lambda _: np.asfortranarray(HALF.astype(np.float32)),
    "turned": lambda _: HALF[::-1].copy()[::-1],
    "read-only": lambda _: np.frombuffer(HALF.tobytes(), np.float16).reshape(50, 3),
    "nothing masked": lambda _: np.ma.masked_array(HALF, np.zeros_like(HALF, bool)),
    "a parameter": lambda _: torch.nn.Parameter(torch.from_numpy(HALF)),
    ".npy": lambda folder: in_file("x.npy", lambda path: np.save(path, HALF), folder),
    ".safetensors": lambda folder: in_file(
        "x.safetensors", lambda path: save_file({"x": torch.from_numpy(HALF)}, path), folder
    ),
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.filterwarnings("error")
def test_one_content_has_one_fingerprint_whatever_holds_it(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = WEIGHTS.astype(np.float32)
    given = HELD[held](tmp_path), torch.from_numpy(LABELS).to(torch.int8), weights
    expected = otdd.LabeledSamples.from_arrays(HALF, LABELS, WEIGHTS).fingerprint
    assert otdd.LabeledSamples.from_arrays(*given).fingerprint == expected
    # In blocks of rows.
    monkeypatch.setattr(file_features, "BLOCK_BYTES", 12 * 7)
    assert otdd.LabeledSamples.from_arrays(*given).fingerprint == expected


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_one_content_is_at_distance_0_from_itself_whatever_holds_it(tmp_path: Path) -> None:
    """Float16 in a file was at 0 in [-1e-5, 1.4e-3] from itself in memory."""
    pair = [
        otdd.LabeledSamples.from_arrays(features, LABELS, WEIGHTS)
        for features in (HELD[".npy"](tmp_path), HALF)
    ]
    for one, other in (pair, reversed(pair)):
        found = otdd.dataset_distance(one, other, labels="means")
        assert (found.value, found.bounds) == (0, (0, 0))
    assert otdd.pairwise_distances(pair, labels="none").values.tolist() == [[0, 0]] * 2
    assert otdd.sliced_distances(pair, projections=5).values.tolist() == [[0, 0]] * 2


def test_other_content_has_another_fingerprint() -> None:
    """A rounded copy is, unless nothing was rounded; rows of both kinds in one block."""
    single = torch.from_numpy(HALF.astype(np.float32)) / 3
    double = single.double()
    double[7, 1] += 1e-12
    huge, zeros = torch.full((2, 1), 1e300, dtype=torch.float64), torch.zeros(50, 1)
    pairs = (double, double.float()), (huge, 2 * huge), (single, single.double()), (zeros, -zeros)
    same = [len({otdd.LabeledSamples(each, None, ()).fingerprint for each in p}) for p in pairs]
    assert same == [2, 2, 1, 1]
    # Names cannot pass for others.
    kinds = torch.zeros(50, dtype=torch.int64)
    named = (otdd.LabeledSamples(zeros, kinds, names) for names in (("a", "b"), ("a\0b",)))
    assert len({each.fingerprint for each in named}) == 2


FOUR = np.arange(4) % 2
HOLE = np.ma.masked_array(np.ones((4, 2)), [[0, 0], [0, 0], [0, 0], [0, 1]])
WITHOUT_WEIGHT = np.ma.masked_array(np.ones(4), [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("features", HOLE, "features are masked at row 3; leave those rows out, or fill them"),
        ("features", TABLE.mask(TABLE == 3), "are missing at row 2 in column 'count'; leave"),
        ("features", pa.table({"a": [1, None, 2, None]}), "at rows 1, 3 in column 'a'"),
        ("features", pa.array([[1], [None], [1], None]), "are missing at rows 1, 3; leave"),
        ("features", [[10**400]], r"got 1000000.*… \(401 characters\) at row 0"),
        ("features", np.ones((1, 1), np.longdouble) / 3, "got 0.33333333333333333334 at row 0"),
        ("features", [[Decimal(2**53) + Decimal("0.5")]], "got 9007199254740992.5 at row 0"),
        ("features", [[1], [2, 3]], "must be real numbers, got list of 2 items"),
        ("features", pd.DataFrame({"a": [1.0], "b": ["x"]}), "column 'b' holds 'x'; leave it out"),
        ("labels", np.ma.masked_array(FOUR, FOUR == 1), "2 labels are missing, at rows 1, 3;"),
        ("labels", np.array([b"a", b"\xff"])[FOUR], r"text in UTF-8, got b'\\xff'; decode"),
        ("labels", pa.array([1, 2, None, 2]), "1 label is missing, at row 2"),
        ("weights", WITHOUT_WEIGHT, "weights are masked at rows 1, 3;"),
    ],
)
def test_what_is_missing_or_not_held_is_named(part: str, value: Any, message: str) -> None:
    parts = {"features": TABLE, "labels": KINDS["string"], "weights": None, part: value}
    with pytest.raises(InputError, match=message):
        otdd.LabeledSamples.from_arrays(**parts)
