"""Tables of class distances, of two datasets and of many: made, cut, named, saved, refused."""

from __future__ import annotations

import live_bytes
import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.labels import (
    Gaussian,
    Given,
    JointClassDistances,
    Sinkhorn,
    class_distances,
    measure_classes,
    metric_named,
)
from otdd_flash.labels.pairs import all_pairs, symmetric_table
from otdd_flash.labels.table import ClassDistances
from otdd_flash.samples import LabeledSamples

XX = np.array([[0.0, 2.0], [2.0, 0.0]])
XY = np.array([[1.0, 3.0, 5.0], [4.0, 6.0, 8.0]])
YY = np.zeros((3, 3))
NAMES = ("a", "b"), ("c", "d", "é")
FIVE = np.full((5, 5), 9.0)


@pytest.fixture
def datasets(blobs):
    return [
        blobs(sizes, 3, k, name=f"set {k}") for k, sizes in enumerate([(4, 5), (6,), (3, 4, 5)])
    ]


# Of two datasets.


def test_a_table_is_made_of_blocks_of_any_numbers_and_cut_back_into_them():
    xy = torch.tensor(XY).half().requires_grad_()
    table = ClassDistances([[0.0, 0.1], [0.1, -1e-7]], xy, YY.astype(np.float32), *NAMES)
    for block in (table.xx, table.xy, table.yy):
        assert (block.dtype, block.device.type) == (torch.float64, "cpu")
        assert not block.requires_grad
    # Lists keep all their digits, and rounding is no error.
    assert table.xx.tolist() == [[0.0, 0.1], [0.1, -1e-7]]
    assert torch.equal(table.full, table.full.T)
    assert table.full[1, 4] == 8
    again = ClassDistances.from_full(table.full, 2)
    for key in ("xx", "xy", "yy"):
        assert torch.equal(getattr(again, key), getattr(table, key))


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


def test_the_nearest_class_is_told_both_ways():
    table = ClassDistances(XX, XY[:, ::-1].copy(), YY, *NAMES)
    # [[5, 3, 1], [8, 6, 4]]
    assert table.nearest() == (
        ("source", "a", "é", 1.0),
        ("source", "b", "é", 4.0),
        ("target", "c", "a", 5.0),
        ("target", "d", "a", 3.0),
        ("target", "é", "a", 1.0),
    )
    assert [row.nearest for row in ClassDistances(XX, XY, YY).nearest()] == ["0"] * 5


@pytest.mark.parametrize("names", [(None, None), NAMES])
@pytest.mark.parametrize("bounds", [False, True])
def test_saved_tables_load_again(tmp_path, names, bounds):
    plain = ClassDistances(XX, XY, YY)
    ends = {"lower": plain.full - 1, "upper": plain.full + 2} if bounds else {}
    ClassDistances(XX, XY, YY, *names, **ends).save(tmp_path / "table.w")
    loaded = ClassDistances.load(str(tmp_path / "table.w"))
    assert (loaded.names_x, loaded.names_y) == names
    assert torch.equal(loaded.full, plain.full)
    for other in (loaded, loaded.named_for(*NAMES)):
        assert (other.lower is None) == (not bounds)
        if bounds:
            assert torch.equal(other.lower, plain.full - 1)
            assert torch.equal(other.upper, plain.full + 2)
    # As any file with the three arrays.
    np.savez(tmp_path / "w.npz", xx=XX, xy=XY.astype(int), yy=YY, other=np.arange(3))
    assert ClassDistances.load(tmp_path / "w.npz").xy.tolist() == XY.tolist()


def test_given_tables_are_taken_as_they_are_and_those_of_other_classes_refused(datasets, tmp_path):
    pair = datasets[0], datasets[2]
    table = measure_classes(*pair, Gaussian())
    table.save(tmp_path / "w.npz")
    for given in (table, tmp_path / "w.npz", str(tmp_path / "w.npz")):
        used = measure_classes(*pair, Given(given))
        assert torch.equal(used.full, table.full)
        assert (used.names_x, used.names_y) == (("0", "1"), ("0", "1", "2"))
    with pytest.raises(InputError, match=r"about 3 source classes, but the source has 2 \(0, 1\)"):
        measure_classes(*pair, Given(ClassDistances(YY, XY.T, XX)))
    named = ClassDistances(XX, XY, YY, ("0", "1"), ("cat", "dog", "owl"))
    with pytest.raises(InputError, match=r"target classes cat, dog, owl, .* has 0, 1, 2"):
        measure_classes(*pair, Given(named))


# Of many.


@pytest.mark.parametrize("labels", ["gaussian", Sinkhorn(epsilon=1.0)])
def test_saved_tables_of_many_load_again(datasets, labels, tmp_path):
    table = otdd.class_distances(datasets, labels)
    table.save(tmp_path / "table.w")
    loaded = JointClassDistances.load(tmp_path / "table.w")
    assert (loaded.datasets, loaded.class_names) == (table.datasets, table.class_names)
    assert loaded.offsets == (0, 2, 3, 6)
    assert torch.equal(loaded.full, table.full)
    assert (loaded.lower is None) == (labels == "gaussian")
    if loaded.lower is not None:
        assert torch.equal(loaded.lower, table.lower)
        assert torch.equal(loaded.upper, table.upper)
        assert torch.equal(
            loaded.between(2, 0).upper, table.between(0, 2).upper.roll((3, 3), (0, 1))
        )


def test_equal_classes_are_measured_once_and_shared_names_told_apart_by_place(datasets):
    one, two, _ = datasets
    heard: list[tuple[int, int]] = []
    table = class_distances([one, two, one, one], progress=lambda *event: heard.append(event))
    assert heard[-1] == (3, 3)
    assert torch.equal(table.between(0, 2).xy, table.between(0, 0).xx)
    assert float(table.between(0, 3).xy.diagonal().abs().max()) == 0
    assert table.datasets == ("set 0 (0)", "set 1", "set 0 (2)", "set 0 (3)")


def test_small_classes_go_and_unlabelled_data_are_one_class_without_distances(blobs, datasets):
    sides = [blobs((4, 1), 3, name="left"), blobs((5,), 3, 1), blobs((1, 6), 3, 2)]
    with pytest.warns(DataNotice, match=r"one sample are points.*'1' of left, '0' of "):
        class_distances(sides)
    with pytest.warns(DataNotice, match="fewer than 2"):
        table = class_distances(sides, min_class_size=2)
    assert table.class_names == (("0",), ("0",), ("1",))
    cells = LabeledSamples(torch.eye(3), None, (), name="cells")
    table = class_distances([cells, datasets[0]], "none")
    assert table.class_names == (("all",), ("0", "1"))
    assert not table.full.any()


def test_a_table_is_taken_by_class_names(datasets):
    table = class_distances(datasets)
    some = [datasets[0].keep_classes([1]), datasets[1], datasets[2].keep_classes([2, 0])]
    part = table.named_for(some)
    assert part.class_names == (("1",), ("0",), ("2", "0"))
    rows = [1, 2, 5, 3]
    assert torch.equal(part.full, table.full[rows][:, rows])
    renamed = LabeledSamples(datasets[1].features, datasets[1].labels, ("owl",), name="zoo")
    with pytest.raises(InputError, match="no class owl of zoo; they have 0"):
        table.named_for([datasets[0], renamed, datasets[2]])
    with pytest.raises(InputError, match=r"about 3 datasets .*, but there are 2"):
        table.named_for(datasets[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *_: class_distances(None), "datasets must be a list, got None"),
        (lambda *_: class_distances([]), "holds 0 datasets, and at least 1"),
        (lambda *_: class_distances(["mnist"]), r"datasets\[0\] must be .* got 'mnist'"),
        (lambda *_: class_distances([np.eye(3)]), r"datasets\[0\] has no labels"),
        (lambda sets, _: class_distances(sets[0]), "got LabeledSamples"),
        (lambda sets, wide: class_distances([*sets, wide]), "set 0 has 3 features and wide has 5"),
        (lambda sets, _: class_distances(sets, "gauss"), "unknown labels.method 'gauss'"),
        (lambda sets, _: class_distances(sets, 7), "a name such as .*, or a function .* got 7"),
        (lambda sets, _: class_distances(sets, "given"), "labels=given needs a table"),
        (
            lambda sets, _: class_distances(sets, Given(class_distances(sets).between(0, 1))),
            "class_distances=",
        ),
        (lambda sets, _: class_distances(sets).between(0, 3), "no dataset 3; the table has 3"),
        (lambda sets, _: class_distances(sets).between(0, -1), "at least 0, got -1"),
    ],
)
def test_what_is_refused(datasets, blobs, call, message):
    with pytest.raises(InputError, match=message):
        call(datasets, blobs((4,), 5, name="wide"))


def test_unreadable_files_are_input_errors(datasets, tmp_path):
    np.savez(tmp_path / "two.npz", xx=XX, yy=YY)
    np.savez(tmp_path / "shape.npz", xx=XX, xy=XY.T, yy=YY)
    np.savez(tmp_path / "pickled.npz", xx=XX, xy=np.array([None]), yy=YY)
    np.save(tmp_path / "single.npy", XX)
    (tmp_path / "text.npz").write_text("xx xy yy")
    (tmp_path / "empty.npz").touch()
    table = class_distances(datasets)
    content = {"full": table.full[:4], "offsets": table.offsets, "datasets": table.datasets}
    np.savez(tmp_path / "cut.npz", **content, class_names=[n for g in table.class_names for n in g])
    missing = r"no array full, offsets, datasets, class_names \(it holds: xx"
    for kind, name, message in (
        (ClassDistances, "none.npz", "no such file"),
        (ClassDistances, "two.npz", r"no array xy \(it holds: xx, yy\)"),
        (ClassDistances, "shape.npz", r"shape.npz: .*xy \(3, 2\)"),
        (ClassDistances, "single.npy", "a single array"),
        *((ClassDistances, f"{name}.npz", "cannot read") for name in ("pickled", "text", "empty")),
        (ClassDistances, ".", "cannot read"),
        (JointClassDistances, "none.npz", "no such file"),
        (JointClassDistances, "two.npz", missing),
        (JointClassDistances, "cut.npz", "do not count the same classes"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            kind.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value), name


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gaussian", "sinkhorn", "exact", "means", "upper_bound"])
def test_a_gpu_measures_what_the_processor_does(method, blobs):
    pair = blobs((30, 50), 5), blobs((40, 70, 20), 5, 1, weights=np.arange(130) % 4)
    # Ten times above what float32 potentials on the card can settle to at these costs.
    metric = metric_named(method, {"epsilon": 1.0, "tolerance": 1e-4})
    expected = measure_classes(*pair, metric)
    got = measure_classes(*(side.to("cuda") for side in pair), metric)
    assert got.full.device.type == "cpu"
    torch.testing.assert_close(got.full, expected.full, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_table_takes_little_beside_itself():
    """Where it is made, there may be little room: it is twice as long as the list of pairs."""
    pairs, values = all_pairs(300), torch.rand(300 * 299 // 2, dtype=torch.float64)
    device = torch.device("cpu")
    taken = live_bytes.peak(lambda: symmetric_table(values, pairs, 300), device)
    assert taken < 1.1 * 8 * 300 * 300
