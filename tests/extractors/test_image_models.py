"""timm and torchvision extractors with random weights: nothing is downloaded."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, timm, torchvision

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
