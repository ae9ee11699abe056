"""The pixels extractor against PIL, and its errors."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, pixels

MODES = ["L", "RGB", "P", "RGBA", "LA", "1", "CMYK"]


def pil_reference(image, size):
    """Features by PIL, channel by channel in its float mode, which does not round."""
    channels = [channel.convert("F") for channel in image.split()]
    if size is not None:
        channels = [c.resize((size, size), Image.Resampling.BILINEAR) for c in channels]
    return np.concatenate([np.asarray(channel).ravel() for channel in channels]) / 255


@pytest.mark.parametrize("size", [None, 7, 20, 33])
def test_arrays_match_pil(colour_images, size):
    features = pixels(size)(colour_images).numpy()
    expected = [pil_reference(Image.fromarray(image), size) for image in colour_images]
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize("size", [None, 7])
def test_grayscale_matches_pil(colour_images, size):
    features = pixels(size, grayscale=True)(colour_images).numpy()
    expected = [pil_reference(Image.fromarray(i).convert("L"), size) for i in colour_images]
    # PIL rounds the luma to 8 bit.
    np.testing.assert_allclose(features, expected, atol=0.51 / 255)


@pytest.mark.parametrize("mode", MODES)
def test_every_pil_mode_gives_pixels_in_range(colour_images, mode):
    image = Image.fromarray(colour_images[0]).convert(mode)
    grey = mode in ("L", "LA", "1")
    features = pixels(size=9)([image])
    assert features.shape == (1, 81 if grey else 3 * 81)
    expected = pil_reference(image.convert("L" if grey else "RGB"), 9)
    np.testing.assert_allclose(features[0].numpy(), expected, atol=1e-5)


def test_sixteen_bit_images_keep_their_depth():
    values = np.array([[0, 1], [256, 65535]], dtype=np.uint16)
    from_array = pixels()(values[None])
    assert torch.equal(from_array, torch.tensor([[0, 1, 256, 65535]]) / 65535)
    assert torch.equal(pixels()([Image.fromarray(values)]), from_array)
    # Where it is open what is white, nothing is guessed.
    with pytest.raises(InputError, match="32-bit integers have no value that is white"):
        pixels()([Image.fromarray(values.astype(np.int32))])


@pytest.mark.parametrize("size", [None, 6])
def test_lazy_images_and_arrays_agree_bit_for_bit(make_dataset, colour_images, size):
    lazy = make_dataset([Image.fromarray(image) for image in colour_images])
    whole = embed(make_dataset(colour_images), pixels(size))
    assert torch.equal(embed(lazy, pixels(size), batch_size=2).features, whole.features)


def test_images_of_different_sizes_are_resized_alike(colour_images):
    mixed = [Image.fromarray(colour_images[0]), Image.fromarray(colour_images[1][:10, :13])]
    together = pixels(size=8)(mixed)
    for row, image in enumerate(mixed):
        assert torch.equal(together[row], pixels(size=8)([image])[0])


def test_constant_images_stay_constant():
    images = np.full((2, 16, 16), 51, dtype=np.uint8)
    for size in (5, 16, 40):
        assert torch.allclose(pixels(size)(images), torch.tensor(0.2), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_different_sizes_without_size_name_the_way_out(make_dataset, batch_size):
    # Both have 48 pixels: comparing flattened lengths alone would mix them up.
    shapes = [(6, 8), (8, 6)]
    lazy = make_dataset([Image.fromarray(np.zeros(shape, dtype=np.uint8)) for shape in shapes])
    with pytest.raises(InputError, match=r"6 x 8 .* 8 x 6 .*extractor\.size=N"):
        embed(lazy, pixels(), batch_size=batch_size)


def test_grey_among_colour_is_repeated_in_three_channels(make_dataset):
    mixed = make_dataset([Image.new("L", (4, 4), 51), Image.new("RGB", (4, 4), (0, 102, 255))])
    features = embed(mixed, pixels(), batch_size=1).features.reshape(2, 3, 16)[:, :, 0]
    torch.testing.assert_close(features, torch.tensor([[0.2] * 3, [0, 0.4, 1]]))
    assert embed(mixed, pixels(size=4, grayscale=True)).dim == 16


@pytest.mark.parametrize("size", [0, -3, 2.5, "28", True])
def test_bad_size_is_refused(size):
    with pytest.raises(InputError, match=r"extractor\.size"):
        pixels(size)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 4)), "h, w"),
        (np.zeros((2, 4, 4, 5), dtype=np.uint8), "1 to 4 channels"),
        (np.full((2, 4, 4), 255.0), r"\[0, 1\], got 255 to 255"),
        (np.full((2, 4, 4), np.nan), r"\[0, 1\]"),
        (np.zeros((2, 4, 4), dtype=np.int64), "int64"),
    ],
)
def test_what_is_no_image_is_refused(images, message):
    with pytest.raises(InputError, match=message):
        pixels()(images)


def test_mnist_is_flattened_in_seconds(real_data, make_dataset):
    content = np.fromfile(real_data / "MNIST/raw/train-images-idx3-ubyte", dtype=np.uint8)
    images = content[16:].reshape(-1, 28, 28)
    start = time.perf_counter()
    features = embed(make_dataset(images), pixels()).features
    assert time.perf_counter() - start < 20
    assert features.shape == (60_000, 784)
    assert features.dtype == torch.float32
    row = 59_999
    assert torch.equal(features[row], torch.from_numpy(images[row].ravel()).float() / 255)
