"""experiments.public_numbers: both conventions on 60 rows of digits, its parts and its tables."""

import json
import struct
from decimal import Decimal

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.datasets import load_digits

import otdd_flash as otdd
from experiments import public_numbers
from experiments.public_numbers import CONVENTIONS, DATASETS, DEVIATION, END, MARK, NAME, bracket

ROWS = 60
PAIRS = ["mnist-usps", "usps-mnist", "digits-fashion_mnist", "fashion_mnist-digits"]


def write_idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.asarray(values, np.uint8)
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(head + values.tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three sets in the place of MNIST, Fashion-MNIST and USPS: digits enlarged and turned."""
    folder = tmp_path_factory.mktemp("data")
    digits = load_digits()
    for number, (name, side) in enumerate((("MNIST", 28), ("FashionMNIST", 28), ("USPS", 16))):
        rows = slice(200 * number, 200 * number + 150)
        turned = ndimage.rotate(digits.images[rows], 30 * number, axes=(2, 1), reshape=False)
        images = ndimage.zoom(turned, (1, side / 8, side / 8), order=1).clip(0, 16) * (255 / 16)
        for kind, values in (("images-idx3", images.round()), ("labels-idx1", digits.target[rows])):
            for split in ("train", "t10k"):
                write_idx(folder / name / "raw" / f"{split}-{kind}-ubyte", values)
    return folder


def run(data, output, *more):
    public_numbers.main(
        ["--data-root", str(data), "--samples", str(ROWS), "--output", str(output), *more]
    )
    return json.loads((output / f"{NAME}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def content(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("whole"), "--pairs", *PAIRS)


def row_of(content, source, target, convention):
    keys = {"source": source, "target": target, "convention": convention}
    (row,) = (row for row in content["rows"] if {key: row[key] for key in keys} == keys)
    return row


def test_every_pair_has_values_in_their_intervals_in_both_conventions(content):
    assert len(content["rows"]) == 2 * len(PAIRS)
    for row in content["rows"]:
        assert row["n"] == [ROWS, ROWS]
        exact = row["exact"]
        assert exact["stopped_by"] == "optimal"
        for name in CONVENTIONS[row["convention"]][1]:
            lower, upper = row[name]["bounds"]
            # No entropic value without debiasing is below the exact one.
            assert exact["bounds"][0] <= row[name]["not_debiased_bounds"][1]
            assert name == "updates" or lower <= row[name]["value"] <= upper
            assert name == "updates" or row[name]["converged"]
    ours = row_of(content, "mnist", "usps", "ours")
    assert ours["default"]["epsilon"] == pytest.approx(0.01 * ours["default"]["mean_cost"])
    assert ours["tight"]["marginal_error"] <= 1e-6


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_both_orders_of_a_pair_agree(content, convention):
    for pair in (("mnist", "usps"), ("digits", "fashion_mnist")):
        one, other = (row_of(content, *names, convention) for names in (pair, pair[::-1]))
        for name in CONVENTIONS[convention][1]:
            first, second = one[name], other[name]
            assert first["value"] == pytest.approx(second["value"], rel=1e-6)
            if name != "updates":
                assert first["bounds"][0] <= second["bounds"][1]
                assert second["bounds"][0] <= first["bounds"][1]


def test_the_convention_of_microsoft_otdd_is_that_of_normalised_pixels(data, content):
    sides = [public_numbers.load(name, data, ROWS)[0] for name in ("mnist", "usps")]
    normalised = [
        otdd.LabeledSamples(
            (side.features.double() - 0.1307) / DEVIATION, side.labels, side.class_names
        )
        for side in sides
    ]
    labels = [side.labels.double()[:, None] for side in sides]
    box = [
        torch.cat([side.features, label + shift], 1)
        for side, label, shift in zip(normalised, labels, (0, 10), strict=True)
    ]
    both = torch.cat(box)
    diameter = float((both.amax(0) - both.amin(0)).norm())
    row = row_of(content, "mnist", "usps", "microsoft_otdd")
    double = otdd.ComputeOptions("cpu", precision="double")
    for name, settings in (
        ("exact", {"epsilon": 0, "solver": otdd.Exact(bound_width=0)}),
        ("converged", {"epsilon": 0.1}),
        (
            "updates",
            {"epsilon": 0.1, "solver": otdd.GeomlossSchedule(tolerance=1, diameter=diameter)},
        ),
    ):
        found = otdd.dataset_distance(*normalised, compute=double, **settings)
        assert row[name]["value"] == pytest.approx(found.value, rel=1e-8), name


def test_features_are_those_of_torchvision_and_class_distances_know_no_order(data, content):
    from torchvision.transforms.v2 import functional

    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    sides = []
    for name in DATASETS:
        raw = otdd.load(name, root=data, split=DATASETS[name], max_samples=ROWS)
        images = torch.from_numpy(np.asarray(raw.inputs))[:, None] / 255
        features = functional.resize(images, [28, 28], antialias=True).flatten(1)
        assert (
            public_numbers.sha256(features.numpy()) == content["datasets"][name]["sha256_features"]
        )
        labels = torch.as_tensor(raw.labels)[order]
        sides.append(otdd.LabeledSamples(features[order].flip(1), labels, raw.class_names))
    again = otdd.class_distances(sides).full
    squared = torch.tensor(content["class_distances"]["squared"], dtype=torch.float64)
    torch.testing.assert_close(again, squared, rtol=1e-12, atol=1e-12)


def test_parts_join_to_the_whole_and_a_second_call_measures_nothing(data, content, tmp_path):
    parts = [tmp_path / "0", tmp_path / "1"]
    for place, folder in enumerate(parts):
        part = run(data, folder, "--pairs", *PAIRS, "--part", f"{place}/2")
        assert 0 < len(part["rows"]) < len(content["rows"])
        assert part["datasets"] == content["datasets"]
    public_numbers.main(["--merge", *map(str, parts), "--output", str(tmp_path)])
    joined = json.loads((tmp_path / f"{NAME}.json").read_text("utf-8"))
    keys = ("source", "target", "convention")
    assert {tuple(row[key] for key in keys) for row in joined["rows"]} == {
        tuple(row[key] for key in keys) for row in content["rows"]
    }
    for row in joined["rows"]:
        same = row_of(content, *(row[key] for key in keys))
        assert row["exact"]["value"] == same["exact"]["value"]
    again = run(data, tmp_path, "--pairs", *PAIRS)
    assert again["rows"] == joined["rows"]
    with pytest.raises(SystemExit, match="other data"):
        public_numbers.main(
            ["--data-root", str(data), "--samples", "50", "--output", str(tmp_path)]
        )


def test_no_row_begins_after_the_time_is_over(data, tmp_path, capsys):
    public_numbers.main(
        ["--data-root", str(data), "--samples", "20", "--output", str(tmp_path), "--seconds", "0"]
    )
    assert capsys.readouterr().out == "0 seconds are over; call again for the others\n"
    assert not [*tmp_path.iterdir()]


def test_tables_are_written_between_the_marks_and_again(content, tmp_path):
    (tmp_path / f"{NAME}.json").write_text(json.dumps(content), "utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{MARK}\n\n{END}\n\nafter\n", "utf-8")
    for _ in range(2):
        public_numbers.main(["--table", "--output", str(tmp_path), "--page", str(page)])
        text = page.read_text("utf-8")
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert text.count("| MNIST → USPS |") == 2
    for row in content["rows"]:
        assert f"{row['exact']['value']:.6f}"[:-1] in text
    for name, about in content["datasets"].items():
        assert about["rows"] == ROWS, name
        assert about["sha256_features"][:12] in text
    assert {*content["datasets"]} == {*DATASETS}


def test_tables_refuse_orders_that_contradict(content):
    broken = json.loads(json.dumps(content))
    exact = row_of(broken, "mnist", "usps", "ours")["exact"]
    exact["bounds"] = [each + 1 for each in exact["bounds"]]
    with pytest.raises(AssertionError, match="exclude each other"):
        public_numbers.tables(broken)


def test_a_row_that_contradicts_itself_is_refused(content):
    for name, bounds in (("default", [1e3, 1e4]), ("exact", [1e3, 1e4])):
        row = json.loads(json.dumps(row_of(content, "mnist", "usps", "ours")))
        row[name]["bounds"] = bounds
        with pytest.raises(AssertionError):
            public_numbers.check(row)


@pytest.mark.parametrize(
    ("value", "half"),
    [
        (108.51539370698237, 7e-11),
        (1069.9424114899919, 4e-10),
        (3.0, 0.0),
        (0.123, 0.96),
        (5, 9.96),
    ],
)
def test_a_shown_bracket_holds_the_interval(value, half):
    shown, width = bracket(value, (value - half, value + half)).split(" ± ")
    middle, width = Decimal(shown), Decimal(width)
    assert middle - width <= Decimal(value - half)
    assert Decimal(value + half) <= middle + width
    assert width <= 2 * Decimal(half) + Decimal("1e-15")
