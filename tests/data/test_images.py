"""One decoder for all readers: closed forms for PIL's modes, and folders read in five ways."""

import base64
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

import otdd_flash as otdd
from otdd_flash.data import LabeledDataset, load
from otdd_flash.data.images import extensions, open_image
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors.embedding import inputs_hash

RANDOM = np.random.default_rng(0)
SIZE = (6, 8)
GREY = RANDOM.integers(0, 256, SIZE, dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
# Far from the edges of what sRGB holds, where 8 bits of LAB round coarsely.
MILD = COLOUR // 3 + 80
ALPHA = RANDOM.integers(0, 256, SIZE, dtype=np.uint8)
DEEP = RANDOM.integers(0, 65536, SIZE).astype(np.uint16)
FLOATS = RANDOM.random(SIZE, dtype=np.float32)
INDICES = RANDOM.integers(0, 4, SIZE, dtype=np.uint8)
PALETTE = RANDOM.integers(0, 256, (4, 3), dtype=np.uint8)

pytestmark = pytest.mark.filterwarnings("ignore:images with transparency")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def _palette_image():
    image = Image.fromarray(INDICES, "P")
    image.putpalette(PALETTE.tobytes())
    return image


def _lab():
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    shown = ImageCms.buildTransform(*profiles, "RGB", "LAB")
    image = ImageCms.applyTransform(Image.fromarray(MILD), shown)
    assert image is not None
    return image


def _on_white(values):
    alpha = ALPHA.astype(float) / 255
    return 1 - (1 - values) * (alpha if values.ndim == 2 else alpha[..., None])


def _ycbcr(values):
    """ITU-R BT.601 at full range, as JPEG has it."""
    y, cb, cr = (values[..., k].astype(float) - (128 if k else 0) for k in range(3))
    rgb = [y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb]
    return np.clip(np.stack(rgb, 2), 0, 255) / 255


def _cmyk(values):
    ink = values.astype(float) / 255
    return (1 - ink[..., :3]) * (1 - ink[..., 3:])


FOUR = np.concatenate([COLOUR, ALPHA[..., None]], 2)
# What is saved, as which files, the numbers that are meant, and how far 8 bits take them apart.
MODES = {
    "1": (lambda: Image.fromarray(GREY > 127), "png bmp tif pbm", (GREY > 127).astype(float), 0),
    "L": (lambda: Image.fromarray(GREY), "png bmp tif pgm jp2 tga pcx", GREY / 255, 0),
    "LA": (
        lambda: Image.fromarray(np.stack([GREY, ALPHA], 2)), "png tif tga",
        _on_white(GREY / 255), 0.5,
    ),
    "P": (lambda: _palette_image(), "png bmp tif gif tga", PALETTE[INDICES] / 255, 0),
    "RGB": (lambda: Image.fromarray(COLOUR), "png bmp tif ppm jp2 qoi sgi", COLOUR / 255, 0),
    "RGBA": (lambda: Image.fromarray(FOUR), "png tif jp2 webp", _on_white(COLOUR / 255), 0.5),
    "CMYK": (lambda: Image.fromarray(FOUR, "CMYK"), "tif", _cmyk(FOUR), 1),
    "YCbCr": (lambda: Image.fromarray(COLOUR, "YCbCr"), "tif", _ycbcr(COLOUR), 1),
    "LAB": (_lab, "tif", MILD / 255, 4),
    "I;16": (lambda: Image.fromarray(DEEP), "png tif jp2 pgm", DEEP / 65535, 0),
    "I;16B": (
        lambda: Image.frombytes("I;16B", SIZE[::-1], DEEP.astype(">u2").tobytes()), "png tif",
        DEEP / 65535, 0,
    ),
    "F": (lambda: Image.fromarray(FLOATS), "tif pfm", FLOATS, 0),
}  # fmt: skip
FILES = [(mode, end) for mode, (_, ends, _, _) in MODES.items() for end in ends.split()]
WEBP = {"lossless": True, "exact": True}


def _save(folder, mode, end):
    path = folder / f"{mode.replace(';', '')}-{end}" / f"a.{end}"
    path.parent.mkdir(parents=True)
    MODES[mode][0]().save(path, **(WEBP if end == "webp" else {}))
    return path


def _pixels(image):
    """Values (h, w) or (h, w, 3) in [0, 1]."""
    found = otdd.extractors.pixels().images([image])[0].permute(1, 2, 0).numpy()
    return found[..., 0] if found.shape[2] == 1 else found


def _as_meant(found, expected, levels, name):
    np.testing.assert_allclose(found, expected, 1e-6, (levels + 0.01) / 255, err_msg=name)


def test_a_mode_is_the_numbers_that_it_means_in_any_file_and_in_memory(tmp_path):
    for mode, end in FILES:
        image = open_image(_save(tmp_path, mode, end))
        assert image.mode in ("L", "RGB", "I;16", "F"), f"{mode} in {end}"
        _as_meant(_pixels(image), *MODES[mode][2:], f"{mode} in {end}")
    palette = _palette_image().convert("PA")
    palette.putalpha(Image.fromarray(ALPHA))
    deep = Image.frombytes("I;16L", SIZE[::-1], DEEP.astype("<u2").tobytes())
    for image, expected, levels in (
        (Image.fromarray(COLOUR).convert("RGBX"), COLOUR / 255, 0),
        # Premultiplied to 8 bits and back loses nothing on white.
        (Image.fromarray(FOUR).convert("RGBa"), _on_white(COLOUR / 255), 1.5),
        # Hue in 8 bits.
        (Image.fromarray(COLOUR).convert("HSV"), COLOUR / 255, 5),
        (palette, _on_white(PALETTE[INDICES] / 255), 0.5),
        (deep, DEEP / 65535, 0),
    ):
        _as_meant(_pixels(image), expected, levels, image.mode)


def _read(reader, folder, tmp_path, datasets):
    root = {"root": str(folder)}
    if reader == "DatasetFolder":
        root["extensions"] = list(extensions())
    if "Folder" in reader:
        return load("torchvision", dataset=reader, arguments=root)
    if reader == "imagefolder":
        return load("huggingface", path=str(folder))
    path, table = tmp_path / reader, datasets.load_dataset(str(folder), split="train")
    (table.save_to_disk if reader == "saved" else table.to_parquet)(path)
    return load("huggingface", path=str(path))


# The datasets library does not know the last two.
HUGGING_FACE = tuple(set(extensions()) - {".pfm", ".qoi"})
TORCHVISION = (".png", ".bmp", ".tif", ".ppm", ".pgm", ".webp")


READERS = {
    "imagefolder": HUGGING_FACE,
    "saved": HUGGING_FACE,
    "a.parquet": HUGGING_FACE,
    "DatasetFolder": tuple(extensions()),
    "ImageFolder": TORCHVISION,
}


@pytest.mark.slow
def test_a_folder_gives_the_same_numbers_whichever_reads_it(tmp_path, datasets):
    expected = {}
    for reader, ends in READERS.items():
        folder = tmp_path / f"{len(ends)}"
        if ends not in expected:
            for mode, end in FILES:
                if f".{end}" in ends:
                    _save(folder, mode, end)
            expected[ends] = load("image_folder", path=str(folder))
            assert len(expected[ends]) > 15
        one, other = expected[ends], _read(reader, folder, tmp_path, datasets)
        assert other.class_names == one.class_names, reader
        features = [otdd.embed(each, otdd.extractors.pixels()).features for each in (one, other)]
        assert torch.equal(*features), reader


def test_images_stand_upright(tmp_path):
    """EXIF's orientations, by what a viewer has to do with the rows and columns that are stored."""
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :8] = 255
    turned = upright[::-1, ::-1]
    stored = [upright, upright[:, ::-1], turned, upright[::-1], upright.T]
    stored += [np.rot90(upright), turned.T, np.rot90(upright, -1)]
    (tmp_path / "photos" / "a").mkdir(parents=True)
    files = [(turn, end) for turn in range(1, 9) for end in ("jpg", "png", "webp", "tif")]
    for turn, end in files:
        exif = Image.Exif()
        exif[0x0112] = turn
        path = tmp_path / "photos" / "a" / f"{turn}.{end}"
        image = Image.fromarray(np.ascontiguousarray(stored[turn - 1]))
        image.save(path, exif=exif, **(WEBP if end == "webp" else {}))
    dataset = load("image_folder", path=str(tmp_path / "photos"))
    assert len(dataset) == len(files)
    for path, image in zip(dataset.inputs.paths, dataset.inputs, strict=True):
        found = _pixels(image)
        found = found if found.ndim == 2 else found[..., 0]
        np.testing.assert_allclose(found, upright / 255, atol=0.05, err_msg=str(path))


def test_grey_is_repeated_where_others_have_colour_and_depths_agree(tmp_path):
    """One picture as grey and as colour, in 8 and 16 bits, with and without a palette."""
    pictures = {
        "a.png": Image.fromarray(GREY),
        "b.png": Image.fromarray(GREY.astype(np.uint16) * 257),
        "c.png": Image.fromarray(np.repeat(GREY[..., None], 3, 2)),
        "d.tif": Image.fromarray((GREY / 255).astype(np.float32)),
        "e.gif": Image.fromarray(GREY),
    }
    for folder, names in (("grey", ["a.png", "b.png", "d.tif"]), ("both", list(pictures))):
        (tmp_path / folder / "x").mkdir(parents=True)
        for name in names:
            pictures[name].save(tmp_path / folder / "x" / name)
    expected = torch.from_numpy(GREY.ravel()).double() / 255
    for folder, channels in (("grey", 1), ("both", 3)):
        dataset = load("image_folder", path=str(tmp_path / folder))
        for batch in (1, 100):
            found = otdd.embed(dataset, otdd.extractors.pixels(), batch_size=batch).features
            wanted = expected.repeat(len(dataset), channels)
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


def _keyed(image, palette=None):
    if palette is not None:
        image.putpalette(palette)
    image.info["transparency"] = 0
    return image


def test_what_alpha_shows_is_seen():
    """Black of two shapes on a transparent ground: equal where alpha is dropped."""
    shapes = np.zeros((2, *SIZE), np.uint8)
    shapes[0, :3], shapes[1, :, 4:] = 255, 255
    rgba = np.zeros((2, *SIZE, 4), np.uint8)
    rgba[..., 3] = shapes
    # Level 1 is nearly black.
    levels = shapes // 255
    for kind, items in (
        ("RGBA", [Image.fromarray(each) for each in rgba]),
        ("P", [_keyed(Image.fromarray(each, "P"), bytes(6)) for each in levels]),
        ("L key", [_keyed(Image.fromarray(each)) for each in levels]),
        ("array", list(rgba)),
    ):
        with pytest.warns(DataNotice, match="transparency are laid on white"):
            found = otdd.extractors.pixels(grayscale=True)(items).numpy()
        wanted = 1 - shapes.reshape(2, -1) / 255.0
        np.testing.assert_allclose(found, wanted, atol=1.01 / 255, err_msg=kind)
    # Opaque ones are taken without a word.
    opaque = np.concatenate([COLOUR, np.full((*SIZE, 1), 255, np.uint8)], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(_pixels(Image.fromarray(opaque)), np.float32(COLOUR / 255))


# PIL does not write such files: a PNG of one pixel, of 16 bits a channel.
DEEP_COLOUR = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAA"
    "D0lEQVR4nGMQMvn/n4EBAAhwAkXkZmAVAAAAAElFTkSuQmCC"
)


def test_deep_colour_that_is_read_in_8_bits_is_said():
    with pytest.warns(DataNotice, match="several channels of 16 bits in 8 bits"):
        image = open_image(base64.b64decode(DEEP_COLOUR))
    assert image.getpixel((0, 0)) == (0x12, 255, 0)


def _frames(path):
    pages = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    pages[0].save(path, save_all=True, append_images=pages[1:])


def _white_drawing(path):
    Image.fromarray(np.concatenate([np.full((*SIZE, 3), 255, np.uint8), FOUR[..., 3:]], 2)).save(
        path
    )


def _cut(path):
    Image.fromarray(COLOUR).resize((80, 80)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _drawing(path):
    Image.fromarray(COLOUR).save(path, "EPS")


REFUSED = [
    ("a.tif", lambda p: Image.fromarray(GREY.astype(np.int32)).save(p), "32-bit integers have no"),
    ("a.tif", lambda p: Image.fromarray(FLOATS * 255).save(p), r"in \[0, 1\], got .* rescale them"),
    ("a.tif", lambda p: Image.fromarray(FLOATS * np.nan).save(p), r"in \[0, 1\], got nan"),
    ("a.webp", _frames, "has 2 frames; save the one that is meant"),
    ("a.gif", _frames, "has 2 frames"),
    ("a.png", _white_drawing, "white on a transparent ground"),
    ("a.png", _drawing, "EPS files hold no picture"),
    ("a.jpg", _cut, "truncated"),
    ("a.png", _cut, "truncated"),
    ("a.png", lambda p: p.write_bytes(b""), "damaged, empty or no image"),
]


@pytest.mark.slow
def test_what_cannot_be_meant_is_refused_by_name(tmp_path, datasets):
    for case, (name, write, message) in enumerate(REFUSED):
        root = tmp_path / f"{case}"
        good = root / "photos" / "x" / "0.png"
        good.parent.mkdir(parents=True)
        Image.fromarray(COLOUR).save(good)
        write(good.with_name(name))
        rows = {"image": [str(good), str(good.with_name(name))], "label": ["x", "y"]}
        table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        table.save_to_disk(root / "saved")
        options = {"dataset": "ImageFolder", "arguments": {"root": str(root / "photos")}}
        readers = [
            (load("image_folder", path=str(root / "photos")), f"x/{name}"),
            (load("huggingface", path=str(root / "saved")), "row 1 of"),
        ]
        if not name.endswith("gif"):
            readers.append((load("torchvision", **options), "row 1 of|a[.]"))
        for dataset, place in readers:
            with pytest.raises(InputError, match=f"(?s)(?:{place}).*{message}"):
                otdd.embed(dataset, otdd.extractors.pixels())


def test_arrays_are_scaled_by_the_range_of_their_type(tmp_path):
    """Dark 16-bit images were taken for 8-bit ones, and those of bool for nearly black."""
    for dtype, white in (("u1", 255), ("u2", 65535), (">u2", 65535), ("?", 1), ("f4", 1)):
        values = (RANDOM.random((5, 4, 4)) * (1 if white == 1 else 256)).round().astype(dtype)
        np.savez(tmp_path / "a.npz", x=values)
        dataset = load("arrays", path=str(tmp_path / "a.npz"))
        found = otdd.embed(dataset, otdd.extractors.pixels()).features.numpy()
        wanted = values.reshape(5, -1).astype(float) / white
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=dtype)


def test_features_of_another_decoder_are_not_served(tmp_path, monkeypatch):
    _save(tmp_path, "L", "png")
    before = inputs_hash(load("image_folder", path=str(tmp_path)))
    assert inputs_hash(load("image_folder", path=str(tmp_path))) == before
    monkeypatch.setattr("otdd_flash.extractors.embedding.DECODING", 1)
    assert inputs_hash(load("image_folder", path=str(tmp_path))) != before
    # The same indices and palette, one of which is transparent.
    keyed = [_palette_image(), _keyed(_palette_image())]
    pair = [LabeledDataset([image], None, (), None, "image", "mine") for image in keyed]
    assert inputs_hash(pair[0]) != inputs_hash(pair[1])
