"""Features without a network: pixels, vectors, what a function returns, and linear maps of these.

`otdd_flash.extractors` exports `pixels`, `identity` for numeric vectors, and `from_callable`, and
builds them by name. `extractors.embedding`, `extractors.vision_models` (which makes the features of
flows by `resized` and `on_tensors`) and `commands.sides` recognise their classes;
`extractors.embedding` and `extractors.feature_store` call `require_same_shape`.

Their features are never cached: pixels and vectors are cheap to compute, and a function has no
content that identifies what it computes. Errors of a user's function are reported with its name.
Resizing must stay differentiable, because flows move pixels through it. Vectors are the user's
data: float64 must stay, and integers that float32 rounds must be refused
(`tests/extractors/test_plain_extractors.py`).

`standardize` and `reduce_pca` are maps that are fitted on both sides of a comparison;
`otdd_flash.extractors` exports them, and `commands.sides` and `commands.study` call them after
`embed`. Both sides must get the same map, fitted on all n + m rows alike, or their distance would
have no meaning (`tests/extractors/test_joint_treatment.py`). `standardize` sums in float64, because
float32 loses digits over many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from otdd_flash.arguments import Count, Seed, count, takes
from otdd_flash.checks import called, refused, shown
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.data.images import any_colour, image_array, unit_images
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.memory import check_room
from otdd_flash.plugins import FORM, import_callable, user_code
from otdd_flash.real_numbers import check_integers, dense, exact_array, real_tensor
from otdd_flash.samples import LabeledSamples, check_same_dimension, check_squares
from otdd_flash.shown import display

# ITU-R BT.601 luma, the weights of PIL's convert("L").
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class PixelValues:
    """The extractor of pixel values; see `pixels`.

    Attributes:
        three_channels: repeat grey values in three channels, if a dataset holds images of both
            kinds. It follows from the data, so it is not in `key`.
    """

    size: int | None = None
    grayscale: bool = False
    three_channels: bool = False
    modalities: frozenset[str] = frozenset({"image"})
    cacheable: bool = False

    @property
    def key(self) -> str:
        return f"pixels size={self.size} grayscale={self.grayscale}"

    def __repr__(self) -> str:
        return f"pixels(size={self.size}, grayscale={self.grayscale})"

    def suited_to(self, inputs: Any) -> PixelValues:
        """Return this extractor for a dataset, with three channels if any image has colour."""
        alike = self.grayscale or (isinstance(inputs, np.ndarray) and inputs.dtype != object)
        return self if alike else replace(self, three_channels=any_colour(inputs))

    def images(self, batch: Any) -> Tensor:
        """Return the batch as images (b, c, size, size), float32 in [0, 1]."""
        if isinstance(batch, np.ndarray) and batch.dtype != object:
            return self.resized(unit_images(batch))
        arrays = [image_array(item) for item in batch]
        if len({(array.shape, array.dtype) for array in arrays}) == 1:
            return self.resized(unit_images(np.stack(arrays)))
        images = [self.resized(unit_images(array[None])) for array in arrays]
        require_one_shape([tuple(image.shape[1:]) for image in images])
        return torch.cat(images)

    def resized(self, images: Tensor) -> Tensor:
        """Return images (b, c, h, w) in [0, 1] with this extractor's size and channels.

        It is differentiable.
        """
        if self.three_channels:
            images = images.expand(-1, 3, -1, -1)
        elif self.grayscale and images.shape[1] == 3:
            images = torch.einsum("bchw,c->bhw", images, images.new_tensor(LUMA))[:, None]
        if self.size is None or images.shape[2:] == (self.size, self.size):
            return images
        count, channels = images.shape[:2]
        check_room(
            f"{count} images of extractor.size={self.size}",
            count * channels * self.size**2 * images.element_size(),
            "lower extractor.size",
            images.device,
        )
        return functional.interpolate(
            images, size=(self.size, self.size), mode="bilinear", antialias=True
        )

    def __call__(self, batch: Any) -> Tensor:
        """Return features (b, c * size * size), channel after channel, rows from the top."""
        return self.images(batch).flatten(1)


# `takes` checks arguments by their annotations.
@takes(prefix="extractor.")
def pixels(size: Count | None = None, grayscale: bool = False) -> PixelValues:
    """Make an extractor of the pixel values of images, vectors in [0, 1].

    A dataset of grey images has one channel, one with colour images three; grey images beside
    colour ones are repeated in the three channels.

    Args:
        size: side in pixels to which every image is resized (bilinear, antialiased when it shrinks;
            the aspect ratio is not kept); None keeps the native size, which all images must share.
        grayscale: average colour channels to luma, so that colour and grey images can be compared.

    Raises:
        InputError: the size is not a positive integer; when called, images of different shapes.
    """
    return PixelValues(size, grayscale)


def require_one_shape(shapes: list[tuple[int, ...]]) -> None:
    """Refuse image shapes (c, h, w) that differ.

    Raises:
        InputError: they differ; the message names the settings that make them equal.
    """
    distinct = sorted(set(shapes))
    if len(distinct) == 1:
        return
    ways = []
    if len({shape[1:] for shape in distinct}) > 1:
        ways.append("extractor.size=N resizes all to N x N")
    if len({shape[0] for shape in distinct}) > 1:
        ways.append("extractor.grayscale=true drops colour")
    named = " and ".join(f"{h} x {w} with {c} channels" for c, h, w in distinct[:2])
    raise InputError(f"images differ in shape ({named}); {', '.join(ways)}")


def require_same_shape(first: torch.Size, shape: torch.Size, name: str) -> None:
    """Refuse an input whose features have another shape than those of the first input.

    Raises:
        InputError: they differ.
    """
    # Three dimensions: an image (c, h, w).
    if len(first) == 3:
        require_one_shape([tuple(first), tuple(shape)])
    if shape != first:
        raise InputError(
            f"inputs of {name} have no common feature dimension: {first.numel()} and "
            f"{shape.numel()}; bring the rows to one length"
        )


@dataclass(frozen=True)
class RawVectors:
    """The extractor of numeric vectors; see `identity`."""

    key: str = "identity"
    modalities: frozenset[str] = frozenset({"array"})
    cacheable: bool = False

    def __repr__(self) -> str:
        return "identity()"

    def __call__(self, batch: Any) -> Tensor:
        """Return a batch (b, ...) of numbers as a matrix (b, d), float64 or else float32."""
        try:
            values = exact_array("identity: inputs", batch)
        except InputError:
            raise
        except ValueError:
            values = np.asarray(batch, dtype=object)
        # Floats, signed and unsigned integers, booleans.
        if values.dtype.kind not in "fiub":
            raise InputError(
                f"identity takes rows of numbers of one length, got {values.dtype} such as "
                f"{str(values[:1])[:60]}; encode text columns as numbers and pad or cut the rows"
            )
        check_integers("identity", values)
        dtype = np.float64 if values.dtype == np.float64 else np.float32
        rows = np.array(values.reshape(len(values), -1), dtype=dtype)
        return torch.from_numpy(rows)


def identity() -> RawVectors:
    """Make an extractor that takes arrays as they are, flattened after the first dimension.

    float64 features stay float64 (a solver may work in double). Other numbers become float32, and
    integers beyond 2^24 that float32 cannot hold are refused.
    """
    return RawVectors()


@dataclass(frozen=True)
class ImportedFunction:
    """The extractor around a function; see `from_callable`."""

    function: Callable[[Any], Any]
    name: str
    modalities: frozenset[str] = frozenset({"image", "text", "array"})
    # A function's computation cannot be identified by content.
    cacheable: bool = False

    @property
    def key(self) -> str:
        """The function's name: not exact, hence never a cache key."""
        return f"callable {self.name}"

    def __repr__(self) -> str:
        return f"from_callable({display(self.name)})"

    def __call__(self, batch: Any) -> Tensor:
        """Return the function's features (b, d) for a batch of b inputs, after checking them."""
        with torch.no_grad(), user_code(f"extractor {self.name}"):
            given = self.function(batch)
        what = f"what {self.name} returns, features (b, d),"
        features = real_tensor(what, dense(what, given)).detach().cpu()
        self._check(features, len(batch))
        check_integers(f"extractor {self.name}", features)
        return features if features.dtype == torch.float64 else features.float()

    def on_tensors(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, c, h, w), differentiable by autograd."""
        with user_code(f"extractor {self.name}"):
            features = self.function(images)
        if not isinstance(features, Tensor):
            raise InputError(
                f"{self.name} must return a tensor (b, d) where images move, got {shown(features)}"
            )
        self._check(features, len(images))
        return features

    def _check(self, features: Tensor, count: int) -> None:
        if features.ndim != 2 or len(features) != count:
            raise InputError(
                f"{self.name} must return one row of features per input, shape ({count}, d), "
                f"got {tuple(features.shape)}"
            )
        if features.is_complex():
            raise InputError(f"{self.name} must return real features, got {features.dtype}")


def from_callable(path: str | Callable[[Any], Any]) -> ImportedFunction:
    """Make a function an extractor.

    Args:
        path: its import path, "package.module:function" or "package.module.function", or the
            function itself. It takes a batch of b inputs (an array with leading dimension b, or a
            list of PIL images in the modes L, RGB, I;16 or F, strings or arrays) and returns
            features (b, d).

    Raises:
        InputError: nothing callable has that path.
    """
    if callable(path):
        name = getattr(path, "__qualname__", type(path).__qualname__)
        return ImportedFunction(path, f"{getattr(path, '__module__', '')}.{name}")
    if not isinstance(path, str):
        raise refused("extractor.path", f"be a function, {FORM}", path)
    return ImportedFunction(import_callable(path, "extractor.path"), path)


ROWS_AT_ONCE = 4096

# Squares of features above this are taken in units of the largest.
HUGE = 1e100


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def standardize(source: Samples, target: Samples) -> tuple[LabeledSamples, LabeledSamples]:
    """Shift and scale every feature to mean 0 and deviation 1 over the n + m rows of both sides.

    The moments are those of all rows alike, whatever their weights. Features that are constant over
    both sides are left unchanged.

    Raises:
        InputError: the sides differ in dimension.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    check_same_dimension(source, target)
    count = len(source) + len(target)
    unit = _unit(source, target)
    mean = torch.stack([(rows / unit).sum(0) for rows in _rows(source, target)]).sum(0) / count
    squares = torch.stack(
        [(rows / unit - mean).square().sum(0) for rows in _rows(source, target)]
    ).sum(0)
    constant = _constant(source.features, target.features.to(source.features.device))
    mean[constant] = 0.0
    unit[constant] = 1.0
    deviation = (squares / count).sqrt()
    deviation[constant] = 1.0
    return _scaled(source, unit, mean, deviation), _scaled(target, unit, mean, deviation)


def _rows(*sides: LabeledSamples) -> Iterator[Tensor]:
    """Yield blocks of rows in float64: sums over 60,000 rows lose digits in float32."""
    device = sides[0].features.device
    for side in sides:
        for block in torch.split(side.features, ROWS_AT_ONCE):
            yield block.to(device, torch.float64)


def _unit(*sides: LabeledSamples) -> Tensor:
    """Return a divisor of features (d,) that keeps squares finite: 1 except for huge features."""
    device = sides[0].features.device
    largest = torch.stack([side.features.abs().amax(0).to(device) for side in sides]).amax(0)
    return torch.where(largest > HUGE, largest.double(), 1.0)


def _constant(x: Tensor, y: Tensor) -> Tensor:
    """Return which features (d,) hold one value only; exact, unlike a computed deviation."""
    (low_x, high_x), (low_y, high_y) = torch.aminmax(x, dim=0), torch.aminmax(y, dim=0)
    return torch.minimum(low_x, low_y) == torch.maximum(high_x, high_y)


def _scaled(side: LabeledSamples, unit: Tensor, mean: Tensor, deviation: Tensor) -> LabeledSamples:
    features = torch.empty_like(side.features)
    unit, mean, deviation = (part.to(features.device) for part in (unit, mean, deviation))
    for block, given in zip(
        torch.split(features, ROWS_AT_ONCE),
        torch.split(side.features, ROWS_AT_ONCE),
        strict=True,
    ):
        block.copy_((given.double() / unit - mean) / deviation)
    return replace(side, features=features)


@computes
@takes(k=called("extractor.pca", count))
def reduce_pca(
    source: Samples, target: Samples, k: int, seed: Seed
) -> tuple[LabeledSamples, LabeledSamples]:
    """Project on the first k principal components, fitted on the n + m rows of both sides alike.

    Args:
        source: n samples with d features.
        target: m samples with d features.
        k: number of components, at most min(n + m, d).
        seed: seed of scikit-learn's randomised solver, which it chooses for large inputs.

    Raises:
        InputError: the sides differ in dimension, or k is not in [1, min(n + m, d)].
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    check_same_dimension(source, target)
    check_squares(source, target)
    most = min(len(source) + len(target), source.dim)
    if k > most:
        raise InputError(
            f"extractor.pca must be an integer from 1 to {most}, the smaller of the number of rows "
            f"and the feature dimension {source.dim}, got {k}"
        )
    from sklearn.decomposition import PCA

    x, y = source.features.cpu(), target.features.cpu()
    fitted = PCA(n_components=k, random_state=seed).fit(torch.cat([x, y]).numpy())

    def project(side: LabeledSamples) -> LabeledSamples:
        features = torch.from_numpy(fitted.transform(side.features.cpu().numpy()))
        return replace(side, features=features.to(side.features), feature_names=None)

    return project(source), project(target)
