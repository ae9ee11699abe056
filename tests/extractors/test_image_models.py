"""timm and torchvision extractors, with random weights and with those of checkpoints."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import naming
from torch import nn

from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, timm, torchvision
from otdd_flash.extractors.checkpoint import load_checkpoint

# Small ones of each kind: a convolutional network and a transformer of timm, and of torchvision.
CASES = [(timm, "test_resnet"), (timm, "test_vit"), (torchvision, "shufflenet_v2_x0_5")]
IDS = ["timm test_resnet", "timm test_vit", "torchvision shufflenet"]
each_model = pytest.mark.parametrize(("factory", "model"), CASES, ids=IDS)


def full_model(factory, model):
    """The library's own model, classifier and all, with weights of seed 5, and its features' d."""
    import timm as timm_library
    import torchvision as torchvision_library

    with torch.random.fork_rng():
        torch.manual_seed(5)
        if factory is timm:
            whole = timm_library.create_model(model, num_classes=10).eval()
            return whole, whole.num_features
        whole = torchvision_library.models.get_model(model).eval()
        return whole, whole.fc.in_features


@pytest.mark.slow
def test_seed_fixes_random_weights_which_are_said_aloud(make_dataset, colour_images):
    before = torch.get_rng_state()
    with pytest.warns(DataNotice, match=r"test_vit has random weights \(seed 0\)") as caught:
        first, again, other = (timm("test_vit", seed=seed) for seed in (0, 0, 1))
    assert {each.filename for each in caught} == {__file__}
    assert torch.equal(torch.get_rng_state(), before)
    assert first.key == again.key != other.key
    features = embed(make_dataset(colour_images[:2]), first).features
    assert torch.equal(embed(make_dataset(colour_images[:2]), again).features, features)


@pytest.mark.slow
@each_model
def test_checkpoint_gives_the_same_features_bit_for_bit(
    make_dataset, colour_images, tmp_path, factory, model
):
    saved, d = full_model(factory, model)
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "w.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        extractor = factory(model, checkpoint=str(tmp_path / "w.pt"))
    # The reference: the library's model up to its head, on inputs prepared image by image.
    inputs = torch.stack([extractor.prepare(image) for image in colour_images[:2]])
    with torch.no_grad():
        if factory is timm:
            expected = saved.forward_head(saved.forward_features(inputs), pre_logits=True)
        else:
            saved.fc = torch.nn.Identity()
            expected = saved(inputs)
    features = embed(make_dataset(colour_images[:2]), extractor).features
    assert features.shape == (2, d)
    assert torch.equal(features, expected)


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
@pytest.mark.slow
@pytest.mark.parametrize(("factory", "model"), [(timm, "resnet10t"), *CASES[1:]])
def test_preparation_is_the_models_own_and_of_every_form_of_an_image(factory, model):
    imagenet = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    value = torch.ones(3) if model == "test_vit" else imagenet
    prepare = factory(model).prepare
    prepared = prepare(Image.new("RGB", (50, 50), (255, 255, 255)))
    expected = value[:, None, None].expand_as(prepared)
    torch.testing.assert_close(prepared, expected, atol=1e-5, rtol=0)
    grey = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    image, wide = Image.fromarray(grey), grey.astype(np.uint16) * 257
    forms = [grey[..., None], np.repeat(grey[..., None], 3, axis=2), wide, Image.fromarray(wide)]
    forms += [grey.astype(np.float32) / 255, image, image.convert("RGB"), image.convert("RGBA")]
    for form in forms:
        assert torch.equal(prepare(form), prepare(grey)), type(form)


def test_bad_requests_name_the_way_out(monkeypatch):
    for factory, model, arguments, message in (
        (timm, "resnet19", {}, "unknown timm model 'resnet19'; close names: .*resnet18"),
        (timm, "vit_tiny", {}, "close names: .*vit_tiny_patch16_224"),
        (timm, "resnet18.none", {}, "no weights 'none' of resnet18.*a1_in1k"),
        (timm, "resnet18", {"pretrained": True, "checkpoint": "w.pt"}, "not both"),
        (timm, "local-dir:/nowhere", {}, "timm cannot build 'local-dir:/nowhere'"),
        (torchvision, "resnet19", {}, "unknown torchvision model 'resnet19'.*resnet18"),
        (torchvision, "resnet18", {"weights": "V9"}, "'V9'; choose one of: IMAGENET1K_V1"),
        (torchvision, "resnet18", {"weights": "DEFAULT", "checkpoint": "w.pt"}, "not both"),
    ):
        with pytest.raises(InputError, match=message):
            factory(model, **arguments)

    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("timm.create_model", offline)
    monkeypatch.setattr("torchvision.models.get_model", offline)
    said = r"no route to host; download=true .*extractor\.checkpoint=FILE"
    for factory, arguments in ((timm, {"pretrained": True}), (torchvision, {"weights": "DEFAULT"})):
        with pytest.raises(InputError, match=said):
            factory("resnet18", **arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::otdd_flash.errors.DataNotice")
def test_named_weights_bring_their_transforms(monkeypatch):
    """V2 resizes to 232 before the crop, V1 to 256."""
    from torchvision import models

    small = models.resnet18()
    monkeypatch.setattr(models, "get_model", lambda model, weights: small)
    extractor = torchvision("resnet50", weights="ResNet50_Weights.IMAGENET1K_V2")
    assert "resize_size=[232]" in extractor.description


@pytest.mark.slow
def test_torchvision_heads_are_removed_wherever_they_stand():
    from torchvision.models import get_model

    from otdd_flash.extractors.vision_models import remove_head

    heads = {"squeezenet1_1": 512, "mobilenet_v3_small": 1024, "vit_b_32": 768, "vgg11": 4096}
    for model, d in heads.items():
        with torch.device("meta"):
            module = get_model(model).eval()
            remove_head(module)
            assert module(torch.empty(2, 3, 224, 224)).shape == (2, d), model


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


WRAPPINGS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {}},
    "both": lambda state: {"model": {"state_dict": state}},
    "distributed": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.module.{n}": v for n, v in state.items()},
    "with a head": lambda state: {**state, "fc.weight": torch.ones(10, 2)},
    "without counters": lambda state: {
        name: value for name, value in state.items() if "num_batches" not in name
    },
}


def test_a_part_that_is_called_as_a_wrapper_keeps_its_name(tmp_path):
    class Outer(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.module = network(seed)

    given, loaded = Outer(1), Outer(2)
    state = {f"_orig_mod.module.{name}": value for name, value in given.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    load_checkpoint(loaded, str(tmp_path / "w.pt"), ())
    for key, tensor in given.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


def test_wrapped_weights_are_found(tmp_path):
    from safetensors.torch import save_file

    files = []
    for place, wrapping in enumerate(WRAPPINGS.values()):
        file = tmp_path / f"{place}{('.pt', '.pth')[place % 2]}"
        torch.save(wrapping(network(1).state_dict()), file)
        files.append(file)
    state = {f"module.{name}": value for name, value in network(1).state_dict().items()}
    files.append(tmp_path / "w.safetensors")
    save_file({**state, "module.fc.bias": torch.ones(10)}, files[-1])
    for name, file in zip([*WRAPPINGS, "safetensors"], files, strict=True):
        loaded = network(2)
        load_checkpoint(loaded, str(file), ("fc",))
        for key, tensor in network(1).state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), (name, key)


@pytest.mark.slow
def test_unfitting_weights_are_named(tmp_path):
    module = network(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    s = network(1).state_dict()
    for given, message in (
        ({k: v for k, v in s.items() if k != "0.weight"}, r"1 missing \(0\.weight\)"),
        ({**s, "fcx.weight": s["0.bias"]}, r"1 unknown \(fcx\.weight\)"),
        ({**s, "0.bias": torch.ones(5)}, r"1 of another shape \(0\.bias \(5,\) for"),
        ({f"x.{k}": v for k, v in s.items()}, r"7 unknown \(.*, \.\.\.\)"),
        ({**s, "args": "lr=3"}, r"more than weights \(args\)"),
        ([*s.values()], "holds no state dict but a list"),
        ({}, "holds no state dict"),
        # A pickled module is not executed.
        (network(0), r"torch\.save\(model\.state_dict\(\), FILE\)"),
    ):
        torch.save(given, tmp_path / "w.pt")
        with pytest.raises(InputError, match=message):
            load_checkpoint(module, str(tmp_path / "w.pt"), ("fc",))
        now = module.state_dict()
        assert all(torch.equal(before[name], now[name]) for name in now), message


def test_unreadable_files_are_named(tmp_path):
    for name in ("w.pt", "w.safetensors"):
        file = tmp_path / name
        with pytest.raises(InputError, match=f"no checkpoint file .*{name}"):
            load_checkpoint(network(0), str(file), ())
        for content in (b"", b"no weights at all"):
            file.write_bytes(content)
            with pytest.raises(InputError, match=f"cannot read checkpoint .*{name}"):
                load_checkpoint(network(0), str(file), ())


@pytest.mark.slow
def test_the_error_names_the_model_of_timm_that_a_checkpoint_fits(tmp_path):
    import timm as library

    torch.save(library.create_model("test_vit3", num_classes=3).state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"does not fit .* missing .*it fits timm's ") as told:
        timm("test_resnet", checkpoint=tmp_path / "w.pt")
    advice = str(told.value).rpartition("extractor=timm extractor.model=")[2]
    assert timm(advice, checkpoint=tmp_path / "w.pt").description.split()[2] == "test_vit3"


@pytest.mark.slow
def test_weights_that_fit_another_model_or_none_are_told(tmp_path):
    import timm as library
    from torchvision.models import resnet18

    state = library.create_model("test_efficientnet", num_classes=5).state_dict()
    others = {f"{i}.{n.rpartition('.')[2]}": state[n] for i, n in enumerate(state)}
    renamed = "timm's test_efficientnet has tensors of these shapes under other names: rename"
    for make, weights, message in (
        (partial(timm, "test_resnet"), others, renamed),
        (partial(timm, "test_resnet"), network(1).state_dict(), "no model of timm .*from_module"),
        # Weights of torchvision are those of timm by the same name.
        (
            partial(torchvision, "squeezenet1_1"),
            resnet18(num_classes=10).state_dict(),
            "timm's resnet18, resnetblur18; choose the one",
        ),
    ):
        torch.save(weights, tmp_path / "w.pt")
        with naming(message), pytest.raises(InputError, match=message):
            make(checkpoint=tmp_path / "w.pt")
