"""MNIST and Fashion-MNIST through torchvision's own classes."""

from __future__ import annotations

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.request import Request
from otdd_flash.data.torchvision_class import read_class


def read_mnist(request: Request) -> LabeledDataset:
    """Read handwritten digits from `root/MNIST/raw` as uint8 images (n, 28, 28)."""
    return read_class(request, "MNIST", class_names=[str(digit) for digit in range(10)])


def read_fashion_mnist(request: Request) -> LabeledDataset:
    """Read clothing from `root/FashionMNIST/raw` as uint8 images (n, 28, 28)."""
    return read_class(request, "FashionMNIST")
