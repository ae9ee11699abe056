"""timm and torchvision extractors with random weights: nothing is downloaded."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, timm, torchvision
from otdd_flash.extractors.base import Extractor

CASES = [
    (timm, "resnet18", 512),
    (timm, "vit_tiny_patch16_224", 192),
    (torchvision, "resnet18", 512),
]
IDS = ["timm resnet18", "timm vit_tiny", "torchvision resnet18"]


def full_model(factory, model):
    """The library's own model, classifier and all, with weights of seed 5."""
    import timm as timm_library
    import torchvision as torchvision_library

    with torch.random.fork_rng():
        torch.manual_seed(5)
        if factory is timm:
            return timm_library.create_model(model, num_classes=10).eval()
        return torchvision_library.models.get_model(model).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "model", "d"), CASES, ids=IDS)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_seed_fixes_random_weights(make_dataset, colour_images, factory, model, d):
    dataset = make_dataset(colour_images[:2])
    before = torch.get_rng_state()
    first, again, other = (factory(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, Extractor)
    assert first.key == again.key != other.key
    features = embed(dataset, first).features
    assert features.shape == (2, d)
    assert torch.equal(embed(dataset, again).features, features)
    assert (features[0] - features[1]).abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "model", "d"), CASES, ids=IDS)
def test_checkpoint_gives_the_same_features_bit_for_bit(
    make_dataset, colour_images, tmp_path, factory, model, d
):
    saved = full_model(factory, model)
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
    assert torch.equal(features, expected)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [timm, torchvision], ids=["timm", "torchvision"])
def test_checkpoint_of_another_model_is_refused(tmp_path, factory):
    torch.save(full_model(factory, "resnet18").state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"layer1\.2\.conv1\.weight"):
        factory("resnet34", checkpoint=str(tmp_path / "w.pt"))


@pytest.mark.parametrize("factory", [timm, torchvision], ids=["timm", "torchvision"])
def test_random_weights_are_said_aloud(factory):
    with pytest.warns(DataNotice, match=r"resnet18 has random weights \(seed 3\)") as caught:
        factory("resnet18", seed=3)
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
@pytest.mark.parametrize("factory", [timm, torchvision], ids=["timm", "torchvision"])
def test_every_form_of_a_grey_image_gives_the_same_features(factory):
    grey = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    forms = [
        grey,
        grey[..., None],
        np.repeat(grey[..., None], 3, axis=2),
        grey.astype(np.float32) / 255,
        grey.astype(np.uint16) * 257,
        Image.fromarray(grey),
        Image.fromarray(grey).convert("RGB"),
        Image.fromarray(grey).convert("RGBA"),
        Image.fromarray(grey.astype(np.uint16) * 257),
    ]
    prepare = factory("resnet18").prepare
    expected = prepare(forms[0])
    assert expected.shape == (3, 224, 224)
    for form in forms[1:]:
        assert torch.equal(prepare(form), expected)


def test_preparation_is_the_models_own():
    white = Image.new("RGB", (50, 50), (255, 255, 255))
    imagenet = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    expected = {
        (timm, "resnet18"): imagenet,
        (timm, "vit_tiny_patch16_224"): torch.ones(3),
        (torchvision, "resnet18"): imagenet,
    }
    for (factory, model), value in expected.items():
        with pytest.warns(DataNotice):
            prepared = factory(model).prepare(white)
        assert torch.allclose(prepared, value[:, None, None].expand(3, 224, 224), atol=1e-5)


@pytest.mark.parametrize(
    ("factory", "model", "arguments", "message"),
    [
        (timm, "resnet19", {}, "unknown timm model 'resnet19'; close names: .*resnet18"),
        (timm, "vit_tiny", {}, "close names: .*vit_tiny_patch16_224"),
        (timm, "resnet18.none", {}, "no weights 'none' of resnet18.*a1_in1k"),
        (timm, "resnet18", {"pretrained": True, "checkpoint": "w.pt"}, "not both"),
        (timm, "local-dir:/nowhere", {}, "timm cannot build 'local-dir:/nowhere'"),
        (torchvision, "resnet19", {}, "unknown torchvision model 'resnet19'.*resnet18"),
        (torchvision, "resnet18", {"weights": "V9"}, "'V9'; choose one of: IMAGENET1K_V1"),
        (torchvision, "resnet18", {"weights": "DEFAULT", "checkpoint": "w.pt"}, "not both"),
    ],
)
def test_bad_requests_name_the_way_out(factory, model, arguments, message):
    with pytest.raises(InputError, match=message):
        factory(model, **arguments)


@pytest.mark.parametrize(
    ("patched", "call"),
    [
        ("timm.create_model", lambda: timm("resnet18", pretrained=True)),
        ("torchvision.models.get_model", lambda: torchvision("resnet18", weights="DEFAULT")),
    ],
)
def test_weights_that_cannot_be_fetched_name_the_way_out(monkeypatch, patched, call):
    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(patched, offline)
    with pytest.raises(
        InputError, match=r"no route to host; download=true .*extractor\.checkpoint=FILE"
    ):
        call()


def test_named_weights_bring_their_transforms(monkeypatch):
    import torchvision.models

    def untrained(model, weights):
        assert weights.name == "IMAGENET1K_V2"
        return torchvision.models.resnet50()

    monkeypatch.setattr(torchvision.models, "get_model", untrained)
    from otdd_flash.extractors import torchvision as factory

    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        extractor = factory("resnet50", weights="ResNet50_Weights.IMAGENET1K_V2")
    # V2 resizes to 232 before the crop, V1 to 256.
    assert "resize_size=[232]" in extractor.description


@pytest.mark.parametrize(
    ("model", "d"),
    [("squeezenet1_1", 512), ("mobilenet_v3_small", 1024), ("vit_b_32", 768), ("vgg11", 4096)],
)
def test_torchvision_heads_are_removed_wherever_they_stand(model, d):
    from torchvision.models import get_model

    from otdd_flash.extractors.torchvision_models import remove_head

    with torch.device("meta"):
        module = get_model(model).eval()
        remove_head(module)
        assert module(torch.empty(2, 3, 224, 224)).shape == (2, d)
