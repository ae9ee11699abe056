"""A network that learned where the particles went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flow_by_hand import HeldOut

from otdd_flash.errors import InputError
from otdd_flash.flows import maps
from otdd_flash.flows.maps import ResidualMap, relative_error
from otdd_flash.samples import LabeledSamples

NAMES = ("a", "b", "c")
SHORT: dict[str, Any] = {"hidden": 16, "epochs": 5, "device": "cpu"}


def turned(n: int = 120, *, labels: bool = True, seed: int = 0) -> tuple[LabeledSamples, ...]:
    """Points and where they go: by a quarter turn, and by their class number along an axis."""
    points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    classes = torch.arange(n) % 3
    before = LabeledSamples(points, classes if labels else None, NAMES)
    ends = torch.stack((-points[:, 1], points[:, 0] + 3 * classes * labels), 1)
    return before, replace(before, features=ends)


def weights_of(residual: ResidualMap) -> torch.Tensor:
    return torch.cat([value.flatten() for value in residual.network.state_dict().values()])


@pytest.mark.slow
def test_held_out_points_go_about_where_the_flow_takes_them(
    held_out: HeldOut, trained: ResidualMap
) -> None:
    assert relative_error(trained, held_out.samples, held_out.truth) < 0.25
    assert relative_error(trained, held_out.flow.before, held_out.flow.after) < 0.12


def test_before_training_it_is_the_identity() -> None:
    before, after = turned()
    residual = ResidualMap.fit(before, after, **{**SHORT, "epochs": 0})
    assert torch.equal(residual(before).features, before.features)


@pytest.mark.slow
def test_it_learns_a_map_of_places_and_classes() -> None:
    plain = ResidualMap.fit(*turned(300, labels=False), hidden=64, device="cpu")
    assert relative_error(plain, *turned(100, labels=False, seed=1)) < 0.15
    residual = ResidualMap.fit(*turned(300), hidden=64, device="cpu")
    assert relative_error(residual, *turned(100, seed=1)) < 0.15
    # Equal points of different classes go different ways, by their names.
    point = LabeledSamples(torch.zeros(3, 2), torch.arange(3), NAMES)
    places = residual(point).features[:, 1]
    torch.testing.assert_close(places, torch.tensor([0.0, 3.0, 6.0]), rtol=0.0, atol=0.6)
    renamed = LabeledSamples(torch.zeros(3, 2), torch.tensor([2, 0, 1]), ("b", "c", "a"))
    assert torch.equal(residual(renamed).features, residual(point).features)


def test_a_seed_gives_one_map_and_leaves_the_global_generator_alone() -> None:
    pair = turned()
    torch.manual_seed(1)
    first = ResidualMap.fit(*pair, **SHORT, seed=3)
    state = torch.random.get_rng_state()
    torch.rand(5)
    again = ResidualMap.fit(*pair, **SHORT, seed=3)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(weights_of(first), weights_of(again))
    assert not torch.equal(weights_of(first), weights_of(ResidualMap.fit(*pair, **SHORT, seed=4)))


@pytest.mark.slow
def test_units_and_origin_do_not_matter() -> None:
    before, after = turned()
    expected = ResidualMap.fit(before, after, **SHORT)(before).features
    there = [replace(side, features=1024 * side.features + 4096) for side in (before, after)]
    found = ResidualMap.fit(there[0], there[1], **SHORT)(there[0]).features
    torch.testing.assert_close((found - 4096) / 1024, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_only_particles_with_mass_teach() -> None:
    before, after = turned()
    weights = (torch.arange(120) % 4 > 0).double()
    carriers = torch.nonzero(weights).squeeze(1)
    expected = ResidualMap.fit(before.take(carriers), after.take(carriers), **SHORT)
    spoiled = after.features.clone()
    spoiled[weights == 0] = 1e6
    weighted = replace(before, weights=weights)
    found = ResidualMap.fit(weighted, replace(after, features=spoiled), **SHORT)
    torch.testing.assert_close(weights_of(found), weights_of(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_heavy_particles_count_more() -> None:
    """Two particles at one place that go two ways: the mean of where they go, by mass."""
    before = LabeledSamples(torch.zeros(400, 1), None, (), torch.tensor([9.0, 1.0]).repeat(200))
    after = LabeledSamples(torch.tensor([[0.0], [10.0]]).repeat(200, 1), None, ())
    residual = ResidualMap.fit(before, after, hidden=8, device="cpu")
    assert float(residual(before).features[0]) == pytest.approx(1.0, abs=0.5)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("n", [1, 9])
def test_few_particles_are_learned_by_heart(n: int) -> None:
    before, after = (side.take(torch.arange(n)) for side in turned())
    residual = ResidualMap.fit(before, after, hidden=64, device="cpu")
    assert relative_error(residual, before, after) < 0.35


def test_particles_that_stay_teach_to_stay() -> None:
    before, _ = turned()
    residual = ResidualMap.fit(before, before, **SHORT)
    assert torch.equal(residual(before).features, before.features)


@pytest.mark.slow
def test_an_epoch_that_makes_it_worse_is_not_kept() -> None:
    """Displacements that nothing explains: the identity is better than what was learned."""
    before, _ = turned(60, labels=False)
    noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(7))
    after = replace(before, features=before.features + noise)
    residual = ResidualMap.fit(before, after, device="cpu")
    moved = residual(before).features - before.features
    assert float(moved.norm()) < 0.6 * float(noise.norm())


@pytest.mark.parametrize("labels", [False, True])
def test_saved_and_loaded_it_is_the_same_bit_for_bit(tmp_path: Path, labels: bool) -> None:
    before, after = turned(labels=labels)
    residual = ResidualMap.fit(before, after, **SHORT, layers=3)
    path = residual.save(tmp_path / "sub" / "map.safetensors")
    loaded = ResidualMap.load(path, device="cpu")
    assert torch.equal(loaded(before).features, residual(before).features)
    assert loaded.class_names == residual.class_names
    assert [entry.name for entry in path.parent.iterdir()] == ["map.safetensors"]


def test_a_file_that_holds_no_map_is_refused(tmp_path: Path) -> None:
    path = ResidualMap.fit(*turned(), **SHORT).save(tmp_path / "map.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"map\.safetensors is damaged"):
        ResidualMap.load(path)
    with pytest.raises(InputError, match=r"no residual map in .*missing"):
        ResidualMap.load(tmp_path / "missing")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="no residual map in"):
        ResidualMap.load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        ResidualMap.fit(*turned(), **SHORT).save(tmp_path / "file" / "map.safetensors")


def test_all_but_the_features_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = turned()
    residual = ResidualMap.fit(before, after, **SHORT)
    samples = replace(before, features=before.features.double(), name="new")
    moved = residual(samples)
    assert moved.name == "new"
    assert moved.class_names == NAMES
    assert moved.features.dtype == torch.float64
    # Row by row: what else is in the batch does not matter, nor how the rows are chunked.
    monkeypatch.setattr(maps.residual, "ROWS_AT_ONCE", 50)
    torch.testing.assert_close(residual(samples).features, moved.features)
    rows = torch.arange(7).flip(0)
    torch.testing.assert_close(residual(samples.take(rows)).features, moved.features[rows])


def test_what_it_cannot_take_is_refused() -> None:
    before, after = turned()
    residual = ResidualMap.fit(before, after, **SHORT)
    with pytest.raises(InputError, match="3 features, but the particles of the flow had 2"):
        residual(LabeledSamples(torch.zeros(1, 3), torch.tensor([0]), NAMES))
    with pytest.raises(InputError, match="did not move: d; it moved a, b, c"):
        residual(LabeledSamples(torch.zeros(1, 2), torch.tensor([0]), ("d",)))
    with pytest.raises(InputError, match="new has no labels, but this map was trained with"):
        residual(LabeledSamples(torch.zeros(1, 2), None, (), name="new"))
    light = replace(before, weights=(before.labels != 2).double())
    with pytest.raises(InputError, match="did not move: c; it moved a, b"):
        ResidualMap.fit(light, after, **SHORT)(before)
    for name, value in (("hidden", 0), ("layers", 0), ("epochs", -1)):
        with pytest.raises(InputError, match=f"{name} must be at least .*, got {value}"):
            ResidualMap.fit(before, after, **{**SHORT, name: value})
    with pytest.raises(InputError, match="row i of both"):
        ResidualMap.fit(before, after.take(torch.arange(5)))
