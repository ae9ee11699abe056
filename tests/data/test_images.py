"""One decoder for all readers: closed forms for PIL's modes, and folders read in five ways."""

import io
import struct
import zlib

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

import otdd_flash as otdd
from otdd_flash.data import LabeledDataset, load
from otdd_flash.data.images import extensions, open_image
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors.input_hash import inputs_hash

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


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _with(image, mode):
    return image if image.mode == mode else image.convert(mode)


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


@pytest.mark.parametrize(("mode", "end"), FILES)
def test_a_mode_in_a_file_is_the_numbers_that_it_means(tmp_path, mode, end):
    image = open_image(_save(tmp_path, mode, end))
    assert image.mode in ("L", "RGB", "I;16", "F")
    expected, levels = MODES[mode][2:]
    np.testing.assert_allclose(_pixels(image), expected, rtol=1e-6, atol=(levels + 0.01) / 255)


@pytest.mark.parametrize("mode", ["RGBX", "RGBa", "La", "HSV", "PA", "I;16L", "I;16N"])
def test_a_mode_that_is_in_memory_only(mode):
    expected, levels = {
        "RGBX": (COLOUR / 255, 0),
        # Premultiplied to 8 bits and back loses nothing on white.
        "RGBa": (_on_white(COLOUR / 255), 1.5),
        "La": (_on_white(GREY / 255), 1.5),
        # Hue in 8 bits.
        "HSV": (COLOUR / 255, 5),
        "PA": (_on_white(PALETTE[INDICES] / 255), 0.5),
        "I;16L": (DEEP / 65535, 0),
        "I;16N": (DEEP / 65535, 0),
    }[mode]
    if mode == "PA":
        image = _palette_image().convert("PA")
        image.putalpha(Image.fromarray(ALPHA))
        assert image.mode == "PA"
    elif mode.startswith("I;16"):
        image = Image.frombytes(mode, SIZE[::-1], DEEP.astype("<u2").tobytes())
    else:
        first = {"RGBa": FOUR, "La": np.stack([GREY, ALPHA], 2)}.get(mode, COLOUR)
        image = Image.fromarray(first).convert(mode)
    np.testing.assert_allclose(_pixels(image), expected, atol=(levels + 0.01) / 255)


def _folder(path, ends):
    for mode, end in FILES:
        if f".{end}" in ends:
            _save(path, mode, end)
    return path


def _read(reader, folder, tmp_path):
    match reader:
        case "image_folder":
            return load("image_folder", path=str(folder))
        case "DatasetFolder":
            arguments = {"root": str(folder), "extensions": list(extensions())}
            return load("torchvision", dataset="DatasetFolder", arguments=arguments)
        case "ImageFolder":
            return load("torchvision", dataset="ImageFolder", arguments={"root": str(folder)})
        case "imagefolder":
            return load("huggingface", path=str(folder))
    table = datasets.load_dataset(str(folder), split="train")
    if reader == "saved":
        table.save_to_disk(tmp_path / "saved")
        return load("huggingface", path=str(tmp_path / "saved"))
    table.to_parquet(tmp_path / "a.parquet")
    return load("huggingface", path=str(tmp_path / "a.parquet"))


# The datasets library does not know the last two.
HUGGING_FACE = tuple(set(extensions()) - {".pfm", ".qoi"})
TORCHVISION = (".png", ".bmp", ".tif", ".ppm", ".pgm", ".webp")


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("reader", "ends"),
    [
        ("imagefolder", HUGGING_FACE),
        ("saved", HUGGING_FACE),
        ("parquet", HUGGING_FACE),
        ("DatasetFolder", extensions()),
        ("ImageFolder", TORCHVISION),
    ],
)
def test_a_folder_gives_the_same_numbers_whichever_reads_it(tmp_path, reader, ends):
    folder = _folder(tmp_path / "photos", ends)
    one, other = (_read(name, folder, tmp_path) for name in ("image_folder", reader))
    assert one.class_names == other.class_names
    assert len(one) > 15
    for row, name in enumerate(one.class_names):
        expected = _pixels(one.inputs[row])
        np.testing.assert_array_equal(_pixels(other.inputs[row]), expected, err_msg=name)
    features = [otdd.embed(each, otdd.extractors.pixels()).features for each in (one, other)]
    assert torch.equal(*features)


@pytest.mark.parametrize("end", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_images_stand_upright(tmp_path, turn, end):
    """EXIF's orientations, by what a viewer has to do with the rows and columns that are stored."""
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :8] = 255
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.T,
        6: np.rot90(upright), 7: upright[::-1, ::-1].T, 8: np.rot90(upright, -1),
    }[turn]  # fmt: skip
    (tmp_path / "photos" / "a").mkdir(parents=True)
    image = Image.fromarray(np.ascontiguousarray(stored))
    exif = Image.Exif()
    exif[0x0112] = turn
    image.save(tmp_path / "photos" / "a" / f"a.{end}", exif=exif, **(WEBP if end == "webp" else {}))
    found = _pixels(load("image_folder", path=str(tmp_path / "photos")).inputs[0])
    found = found if found.ndim == 2 else found[..., 0]
    np.testing.assert_allclose(found, upright / 255, atol=0.05)


def test_an_image_in_memory_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 3
    sink = io.BytesIO()
    Image.fromarray(COLOUR).save(sink, "PNG", exif=exif)
    opened = Image.open(sink)
    np.testing.assert_array_equal(_pixels(opened), (COLOUR[::-1, ::-1] / 255).astype(np.float32))


def test_dark_and_bright_deep_images_are_apart(tmp_path):
    for name, level in (("dark", 1000), ("bright", 60000)):
        for i in range(4):
            path = tmp_path / name / "a" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4), level + i, np.uint16)).save(path)
    sides = [
        otdd.embed(load("image_folder", path=str(tmp_path / name)), otdd.extractors.pixels())
        for name in ("dark", "bright")
    ]
    found = otdd.dataset_distance(*sides, epsilon=1e-3, labels="none")
    # All pixels of all images move by the same: 16 / 2 of its square.
    assert found.value == pytest.approx(8 * (59000 / 65535) ** 2, rel=1e-3)


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
        for dataset in (
            load("image_folder", path=str(tmp_path / folder)),
            load("huggingface", path=str(tmp_path / folder)),
        ):
            for batch in (1, 100):
                found = otdd.embed(dataset, otdd.extractors.pixels(), batch_size=batch).features
                wanted = expected.repeat(len(dataset), channels)
                torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "L key", "I;16 key", "array", "float array"])
def test_what_alpha_shows_is_seen(kind):
    """Black of two shapes on a transparent ground: equal where alpha is dropped."""
    shapes = np.zeros((2, *SIZE), np.uint8)
    shapes[0, :3], shapes[1, :, 4:] = 255, 255
    rgba = np.zeros((2, *SIZE, 4), np.uint8)
    rgba[..., 3] = shapes
    items = list(rgba)
    match kind:
        case "RGBA" | "LA":
            items = [_with(Image.fromarray(each), kind) for each in rgba]
        case "P":
            items = [Image.fromarray(shape // 255, "P") for shape in shapes]
            for item in items:
                item.putpalette(bytes(6))
                item.info["transparency"] = 0
        case "L key":
            items = [Image.fromarray(shape // 255) for shape in shapes]
            for item in items:
                item.info["transparency"] = 0
            # Level 1 is nearly black.
        case "I;16 key":
            items = [_reopened_with_key(shape // 255) for shape in shapes]
        case "float array":
            items = list(rgba.astype(np.float32) / 255)
    with pytest.warns(DataNotice, match="transparency are laid on white"):
        found = otdd.extractors.pixels(grayscale=True)(items).numpy()
    np.testing.assert_allclose(found, 1 - shapes.reshape(2, -1) / 255.0, atol=1.01 / 255)


def _reopened_with_key(levels):
    sink = io.BytesIO()
    Image.fromarray(levels.astype(np.uint16)).save(sink, "PNG", transparency=0)
    return Image.open(sink)


def test_opaque_images_are_taken_without_a_word(recwarn):
    opaque = np.concatenate([COLOUR, np.full((*SIZE, 1), 255, np.uint8)], 2)
    np.testing.assert_array_equal(_pixels(Image.fromarray(opaque)), np.float32(COLOUR / 255))
    assert not recwarn.list


def test_deep_colour_that_is_read_in_8_bits_is_said(tmp_path):
    """PIL does not write such files: a PNG of one pixel, of 16 bits a channel."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header, pixel = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0), b"\0\x12\x34\xff\xff\0\0"
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(pixel)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    with pytest.warns(DataNotice, match="several channels of 16 bits in 8 bits"):
        image = open_image(content)
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
    ("a.tif", _frames, "has 2 frames"),
    ("a.gif", _frames, "has 2 frames"),
    ("a.png", _frames, "has 2 frames"),
    ("a.png", _white_drawing, "white on a transparent ground"),
    ("a.png", _drawing, "EPS files hold no picture"),
    ("a.jpg", _cut, "truncated"),
    ("a.png", _cut, "truncated"),
    ("a.tif", _cut, "truncated"),
    ("a.bmp", _cut, "truncated"),
    ("a.png", lambda p: p.write_bytes(b""), "damaged, empty or no image"),
]


@pytest.mark.parametrize(("name", "write", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path, name, write, message):
    good = tmp_path / "photos" / "x" / "0.png"
    good.parent.mkdir(parents=True)
    Image.fromarray(COLOUR).save(good)
    write(good.with_name(name))
    table = datasets.Dataset.from_dict(
        {"image": [str(good), str(good.with_name(name))], "label": ["x", "y"]}
    ).cast_column("image", datasets.Image())
    table.save_to_disk(tmp_path / "saved")
    options = {"dataset": "ImageFolder", "arguments": {"root": str(tmp_path / "photos")}}
    readers = [
        (load("image_folder", path=str(tmp_path / "photos")), f"x/{name}"),
        (load("huggingface", path=str(tmp_path / "saved")), "row 1 of"),
    ]
    if not name.endswith("gif"):
        readers.append((load("torchvision", **options), "row 1 of|a[.]"))
    for dataset, place in readers:
        with pytest.raises(InputError, match=f"(?s)(?:{place}).*{message}"):
            otdd.embed(dataset, otdd.extractors.pixels())


@pytest.mark.parametrize("image", [Image.fromarray(GREY.astype(np.int32)), Image.new("L", (0, 3))])
def test_a_list_of_images_names_the_row(image):
    inputs = [Image.fromarray(GREY), image]
    dataset = LabeledDataset(inputs, None, (), None, "image", "mine")
    with pytest.raises(InputError, match="row 1: "):
        otdd.embed(dataset, otdd.extractors.pixels())
    with pytest.raises(InputError, match="row 1: "):
        otdd.embed(dataset, otdd.extractors.from_callable(lambda batch: torch.zeros(len(batch), 1)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2", np.bool_, np.float32])
def test_arrays_are_scaled_by_the_range_of_their_type(tmp_path, dtype):
    """Dark 16-bit images were taken for 8-bit ones, and those of bool for nearly black."""
    values = (RANDOM.random((5, 4, 4)) * (1 if dtype in (np.bool_, np.float32) else 256)).round()
    values = values.astype(dtype)
    np.savez(tmp_path / "a.npz", x=values)
    dataset = load("arrays", path=str(tmp_path / "a.npz"))
    found = otdd.embed(dataset, otdd.extractors.pixels()).features.numpy()
    white = {"u1": 255, "u2": 65535}.get(np.dtype(dtype).str[1:], 1)
    np.testing.assert_allclose(found, values.reshape(5, -1).astype(float) / white, rtol=1e-6)


def test_features_of_another_decoder_are_not_served(tmp_path, monkeypatch):
    _save(tmp_path, "L", "png")
    before = inputs_hash(load("image_folder", path=str(tmp_path)))
    assert inputs_hash(load("image_folder", path=str(tmp_path))) == before
    monkeypatch.setattr("otdd_flash.extractors.input_hash.DECODING", 1)
    assert inputs_hash(load("image_folder", path=str(tmp_path))) != before


def test_images_in_memory_are_known_by_what_they_show():
    """The same indices and palette, of which another one is transparent."""
    hashes = set()
    for key in (None, 0, 1):
        image = _palette_image()
        if key is not None:
            image.info["transparency"] = key
        hashes.add(inputs_hash(LabeledDataset([image], None, (), None, "image", "mine")))
    assert len(hashes) == 3
