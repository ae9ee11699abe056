"""Labelled datasets: where raw inputs and labels come from, and which rows are taken."""

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.pseudo_labels import with_pseudo_labels
from otdd_flash.data.registry import load

__all__ = ["LabeledDataset", "load", "with_pseudo_labels"]
