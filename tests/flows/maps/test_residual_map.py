"""A network that learned where the particles went."""

from dataclasses import replace

import pytest
import torch
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.flows import maps
from otdd_flash.flows.maps import ResidualMap, relative_error
from otdd_flash.samples import LabeledSamples

NAMES = ("a", "b", "c")
SHORT = {"hidden": 16, "epochs": 3, "device": "cpu"}


def turned(n=120, *, labels=True, seed=0):
    """Points and where they go: by a quarter turn, and by their class number along an axis."""
    points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    classes = torch.arange(n) % 3
    before = LabeledSamples(points, classes if labels else None, NAMES)
    ends = torch.stack((-points[:, 1], points[:, 0] + 3 * classes * labels), 1)
    return before, replace(before, features=ends)


def weights_of(residual):
    return torch.cat([value.flatten() for value in residual.network.state_dict().values()])


def test_it_is_the_identity_before_training_and_of_particles_that_stay():
    before, after = turned()
    for end, epochs in ((after, 0), (before, 3)):
        residual = ResidualMap.fit(before, end, **{**SHORT, "epochs": epochs})
        assert torch.equal(residual(before).features, before.features)


@pytest.mark.slow
def test_it_learns_a_map_of_places_and_classes():
    residual = ResidualMap.fit(*turned(300), hidden=64, device="cpu")
    assert relative_error(residual, *turned(100, seed=1)) < 0.15
    # Equal points of different classes go different ways, by their names.
    point = LabeledSamples(torch.zeros(3, 2), torch.arange(3), NAMES)
    places = residual(point).features[:, 1]
    torch.testing.assert_close(places, torch.tensor([0.0, 3.0, 6.0]), rtol=0.0, atol=0.6)
    renamed = LabeledSamples(torch.zeros(3, 2), torch.tensor([2, 0, 1]), ("b", "c", "a"))
    assert torch.equal(residual(renamed).features, residual(point).features)
    # A few particles are learned by heart.
    few = [side.take(torch.arange(9)) for side in turned()]
    assert relative_error(ResidualMap.fit(*few, hidden=64, device="cpu"), *few) < 0.35


def test_a_seed_gives_one_map_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, other = (weights_of(ResidualMap.fit(*turned(), **SHORT, seed=k)) for k in (3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(5)
    assert torch.equal(first, weights_of(ResidualMap.fit(*turned(), **SHORT, seed=3)))
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_units_origin_and_particles_without_mass_do_not_matter():
    before, after = turned()
    expected = ResidualMap.fit(before, after, **SHORT)(before).features
    there = [replace(side, features=1024 * side.features + 4096) for side in (before, after)]
    found = ResidualMap.fit(there[0], there[1], **SHORT)(there[0]).features
    torch.testing.assert_close((found - 4096) / 1024, expected, rtol=1e-3, atol=1e-3)
    weights = (torch.arange(120) % 4 > 0).double()
    few = torch.nonzero(weights).squeeze(1)
    expected = ResidualMap.fit(before.take(few), after.take(few), **SHORT)
    spoiled = after.features.masked_fill((weights == 0)[:, None], 1e6)
    ends = replace(after, features=spoiled)
    weighted = ResidualMap.fit(replace(before, weights=weights), ends, **SHORT)
    torch.testing.assert_close(weights_of(weighted), weights_of(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_what_nothing_explains_is_left_alone():
    """An epoch that makes it worse than the identity is not kept."""
    before, _ = turned(60, labels=False)
    noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(7))
    residual = ResidualMap.fit(
        before, replace(before, features=before.features + noise), device="cpu"
    )
    assert float((residual(before).features - before.features).norm()) < 0.6 * float(noise.norm())


@pytest.mark.parametrize("labels", [False, True])
def test_saved_and_loaded_it_is_the_same_bit_for_bit(tmp_path, labels, monkeypatch):
    before, after = turned(labels=labels)
    residual = ResidualMap.fit(before, after, **SHORT, layers=3)
    path = residual.save(tmp_path / "sub" / "map.safetensors")
    loaded = ResidualMap.load(path, device="cpu")
    assert torch.equal(loaded(before).features, residual(before).features)
    assert loaded.class_names == residual.class_names
    assert [entry.name for entry in path.parent.iterdir()] == ["map.safetensors"]
    # All but the features stays.
    samples = replace(before, features=before.features.double(), name="new")
    moved = residual(samples)
    assert (moved.name, moved.class_names) == ("new", before.class_names)
    assert moved.features.dtype == torch.float64
    # Row by row: what else is in the batch does not matter, nor how the rows are chunked.
    monkeypatch.setattr(maps.residual, "ROWS_AT_ONCE", 50)
    torch.testing.assert_close(residual(samples).features, moved.features)
    rows = torch.arange(7).flip(0)
    torch.testing.assert_close(residual(samples.take(rows)).features, moved.features[rows])


def test_files_and_points_that_it_cannot_take_are_refused(tmp_path):
    from safetensors.torch import save_file

    before, after = turned()
    residual = ResidualMap.fit(before, after, **SHORT)
    path = residual.save(tmp_path / "map.safetensors")
    (tmp_path / "half").write_bytes(path.read_bytes()[:900])
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    light = replace(before, weights=(before.labels != 2).double())

    def points(dim, *names):
        return LabeledSamples(torch.zeros(1, dim), torch.tensor([0]) if names else None, names)

    for call, message in (
        (lambda: ResidualMap.load(tmp_path / "half"), "half is damaged"),
        (lambda: ResidualMap.load(tmp_path / "missing"), r"no residual map in .*missing"),
        (lambda: ResidualMap.load(tmp_path / "other"), "no residual map in"),
        (lambda: residual.save(path / "map.safetensors"), "cannot write"),
        (lambda: residual(points(3, "a")), "3 features, but the particles of the flow had 2"),
        (lambda: residual(points(2, "d")), "did not move: d; it moved a, b, c"),
        (lambda: residual(points(2)), "has no labels, but this map was trained with"),
        (lambda: ResidualMap.fit(light, after, **SHORT)(before), "did not move: c; it moved a, b"),
        (lambda: ResidualMap.fit(before, after.take(torch.arange(5))), "row i of both"),
        (lambda: ResidualMap.fit(before, after, hidden=0), "hidden must be at least .*, got 0"),
        (lambda: ResidualMap.fit(before, after, layers=0), "layers must be at least .*, got 0"),
        (lambda: ResidualMap.fit(before, after, epochs=-1), "epochs must be at least .*, got -1"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()
