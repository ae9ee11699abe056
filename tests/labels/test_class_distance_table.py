"""ClassDistances: validation, blocks, saving, and use as the given table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.labels import Gaussian, Given, Sinkhorn, measure_classes
from otdd_flash.labels.table import ClassDistances

XX = np.array([[0.0, 2.0], [2.0, 0.0]])
XY = np.array([[1.0, 3.0, 5.0], [4.0, 6.0, 8.0]])
YY = np.zeros((3, 3))


@pytest.fixture
def pair(blobs):
    return blobs((4, 5), 3, name="left"), blobs((3, 4, 5), 3, seed=1, name="right")


def test_full_is_made_of_the_blocks_and_cut_back_into_them():
    table = ClassDistances(XX, XY, YY, ("a", "b"), ("c", "d", "e"))
    assert table.full.shape == (5, 5)
    assert torch.equal(table.full, table.full.T)
    assert table.full[1, 4] == 8
    again = ClassDistances.from_full(table.full, 2)
    for key in ("xx", "xy", "yy"):
        assert torch.equal(getattr(again, key), getattr(table, key))


def test_blocks_become_float64_on_the_cpu_without_gradient():
    xy = torch.tensor([[3.0]], dtype=torch.float16, requires_grad=True)
    table = ClassDistances([[0]], xy, np.zeros((1, 1), np.float32))
    for block in (table.xx, table.xy, table.yy):
        assert (block.dtype, block.device.type) == (torch.float64, "cpu")
        assert not block.requires_grad


FIVE = np.full((5, 5), 9.0)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ((XX, XY.T, YY), {}, r"shapes .* xx \(2, 2\), xy \(3, 2\), yy \(3, 3\)"),
        ((XX[0], XY, YY), {}, r"xx must be a matrix, got shape \(2,\)"),
        ((XX, XY * np.nan, YY), {}, "xy hold 6 NaN"),
        ((XX, -XY, YY), {}, "xy must not be negative, got -8"),
        ((np.triu(XX), XY, YY), {}, "xx must be symmetric, but differ by 2"),
        ((XX, XY, YY), {"names_x": ("a",)}, r"names_x has 1 names \(a\) for 2 classes"),
        ((XX, [["one"]], YY), {}, "xy must be real numbers, got"),
        ((XX, XY, YY), {"lower": XX}, r"lower bounds .* of shape \(5, 5\), .* got \(2, 2\)"),
        ((XX, XY, YY), {"upper": FIVE * np.inf}, "upper bounds .* must be finite"),
        ((XX, XY, YY), {"lower": FIVE}, "lower bounds .* above the distances by up to 9"),
        ((XX, XY, YY), {"upper": 0 * FIVE}, "upper bounds .* below the distances by up to 8"),
    ],
)
def test_wrong_tables_and_bounds_are_refused(blocks, options, message):
    with pytest.raises(InputError, match=message):
        ClassDistances(*blocks, **options)


def test_bounds_stay_with_their_table(pair, tmp_path):
    plain = ClassDistances(XX, XY, YY)
    assert (plain.lower, plain.upper) == (None, None)
    table = ClassDistances(XX, XY, YY, lower=plain.full - 1, upper=plain.full + 2)
    table.save(tmp_path / "w.npz")
    loaded = ClassDistances.load(tmp_path / "w.npz")
    named = loaded.named_for(("0", "1"), ("0", "1", "2"))
    for other in (loaded, named):
        assert torch.equal(other.lower, plain.full - 1)
        assert torch.equal(other.upper, plain.full + 2)
    sinkhorn = measure_classes(*pair, Sinkhorn(epsilon=1.0))
    assert bool((sinkhorn.lower <= sinkhorn.full).all())
    assert bool((sinkhorn.full <= sinkhorn.upper).all())
    assert measure_classes(*pair, Gaussian()).lower is None


def test_the_nearest_class_is_told_both_ways():
    table = ClassDistances(XX, XY[:, ::-1].copy(), YY, ("a", "b"), ("c", "d", "e"))
    # [[5, 3, 1], [8, 6, 4]]
    assert table.nearest() == (
        ("source", "a", "e", 1.0),
        ("source", "b", "e", 4.0),
        ("target", "c", "a", 5.0),
        ("target", "d", "a", 3.0),
        ("target", "e", "a", 1.0),
    )
    assert [row.nearest for row in ClassDistances(XX, XY, YY).nearest()] == ["0"] * 5


def test_lists_keep_all_their_digits_and_rounding_is_no_error():
    table = ClassDistances([[0.0, 0.1], [0.1, 0.0]], [[1 / 3], [0.7]], [[0.0]])
    assert table.xx.tolist() == [[0.0, 0.1], [0.1, 0.0]]
    assert table.xy.tolist() == [[1 / 3], [0.7]]
    noisy = XX + np.array([[-1e-7, 1e-6], [0, 0]])
    assert float(ClassDistances(noisy, XY, YY).xx[0, 0]) == -1e-7


@pytest.mark.parametrize("names", [(None, None), (("a", "b"), ("c", "d", "é"))])
def test_saved_tables_load_again(tmp_path, names):
    table = ClassDistances(XX, XY, YY, *names)
    table.save(tmp_path / "table.w")
    loaded = ClassDistances.load(str(tmp_path / "table.w"))
    assert (loaded.names_x, loaded.names_y) == names
    assert torch.equal(loaded.full, table.full)
    # As any file with the three arrays.
    np.savez(tmp_path / "w.npz", xx=XX, xy=XY.astype(int), yy=YY, other=np.arange(3))
    assert ClassDistances.load(tmp_path / "w.npz").xy.tolist() == XY.tolist()


def test_unreadable_files_are_input_errors(tmp_path):
    np.savez(tmp_path / "part.npz", xx=XX, yy=YY)
    np.savez(tmp_path / "shape.npz", xx=XX, xy=XY.T, yy=YY)
    np.savez(tmp_path / "pickled.npz", xx=XX, xy=np.array([None]), yy=YY)
    np.save(tmp_path / "single.npy", XX)
    (tmp_path / "text.npz").write_text("xx xy yy")
    (tmp_path / "empty.npz").touch()
    for name, message in {
        "none.npz": "no such file",
        "part.npz": r"no array xy \(it holds: xx, yy\)",
        "shape.npz": r"shape.npz: .*xy \(3, 2\)",
        "single.npy": "a single array",
        **dict.fromkeys(("pickled.npz", "text.npz", "empty.npz", "."), "cannot read"),
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            ClassDistances.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value), name


def test_given_tables_are_taken_as_they_are(pair, tmp_path):
    table = measure_classes(*pair, Gaussian())
    table.save(tmp_path / "w.npz")
    for given in (table, tmp_path / "w.npz", str(tmp_path / "w.npz")):
        used = measure_classes(*pair, Given(given))
        assert torch.equal(used.full, table.full)
        assert (used.names_x, used.names_y) == (("0", "1"), ("0", "1", "2"))


def test_given_tables_about_other_classes_are_refused(pair):
    with pytest.raises(InputError, match=r"about 3 source classes, but the source has 2 \(0, 1\)"):
        measure_classes(*pair, Given(ClassDistances(YY, XY.T, XX)))
    named = ClassDistances(XX, XY, YY, ("0", "1"), ("cat", "dog", "owl"))
    with pytest.raises(InputError, match=r"target classes cat, dog, owl, .* has 0, 1, 2"):
        measure_classes(*pair, Given(named))
