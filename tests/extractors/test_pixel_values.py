"""The pixels extractor against PIL, and its errors."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, pixels


def pil_reference(image, size):
    """Features by PIL, channel by channel in its float mode, which does not round."""
    channels = [channel.convert("F") for channel in image.split()]
    if size is not None:
        channels = [c.resize((size, size), Image.Resampling.BILINEAR) for c in channels]
    return np.concatenate([np.asarray(channel).ravel() for channel in channels]) / 255


def test_arrays_and_every_pil_mode_match_pil(colour_images):
    images = [Image.fromarray(image) for image in colour_images]
    for size in (None, 7, 20, 33):
        features = pixels(size)(colour_images).numpy()
        assert features.dtype == np.float32
        expected = [pil_reference(image, size) for image in images]
        np.testing.assert_allclose(features, expected, atol=1e-5, err_msg=f"{size}")
    for size in (None, 7):
        features = pixels(size, grayscale=True)(colour_images).numpy()
        expected = [pil_reference(image.convert("L"), size) for image in images]
        # PIL rounds the luma to 8 bit.
        np.testing.assert_allclose(features, expected, atol=0.51 / 255, err_msg=f"{size}")
    for mode in ("L", "RGB", "P", "RGBA", "LA", "1", "CMYK"):
        image, grey = images[0].convert(mode), mode in ("L", "LA", "1")
        features = pixels(size=9)([image])
        assert features.shape == (1, 81 if grey else 3 * 81), mode
        expected = pil_reference(image.convert("L" if grey else "RGB"), 9)
        np.testing.assert_allclose(features[0].numpy(), expected, atol=1e-5, err_msg=mode)


def test_sixteen_bit_images_keep_their_depth():
    values = np.array([[0, 1], [256, 65535]], dtype=np.uint16)
    from_array = pixels()(values[None])
    assert torch.equal(from_array, torch.tensor([[0, 1, 256, 65535]]) / 65535)
    assert torch.equal(pixels()([Image.fromarray(values)]), from_array)
    # Where it is open what is white, nothing is guessed.
    with pytest.raises(InputError, match="32-bit integers have no value that is white"):
        pixels()([Image.fromarray(values.astype(np.int32))])


def test_lazy_images_agree_with_arrays_bit_for_bit_and_each_is_resized_by_itself(
    make_dataset, colour_images
):
    lazy = make_dataset([Image.fromarray(image) for image in colour_images])
    for size in (None, 6):
        whole = embed(make_dataset(colour_images), pixels(size))
        assert torch.equal(embed(lazy, pixels(size), batch_size=2).features, whole.features)
    mixed = [Image.fromarray(colour_images[0]), Image.fromarray(colour_images[1][:10, :13])]
    together = pixels(size=8)(mixed)
    for row, image in enumerate(mixed):
        assert torch.equal(together[row], pixels(size=8)([image])[0])
    for size in (5, 16, 40):
        flat = pixels(size)(np.full((2, 16, 16), 51, dtype=np.uint8))
        assert torch.allclose(flat, torch.tensor(0.2), atol=1e-6)


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


def test_what_is_no_image_or_size_is_refused():
    for size in (0, -3, 2.5, "28", True):
        with pytest.raises(InputError, match=r"extractor\.size"):
            pixels(size)
    for images, message in (
        (np.zeros((2, 4)), "h, w"),
        (np.zeros((2, 4, 4, 5), dtype=np.uint8), "1 to 4 channels"),
        (np.full((2, 4, 4), 255.0), r"\[0, 1\], got 255 to 255"),
        (np.full((2, 4, 4), np.nan), r"\[0, 1\]"),
        (np.zeros((2, 4, 4), dtype=np.int64), "int64"),
    ):
        with pytest.raises(InputError, match=message):
            pixels()(images)


@pytest.mark.slow
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
