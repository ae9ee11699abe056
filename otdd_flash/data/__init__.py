"""Labelled datasets: the sources of raw inputs and labels, and the choice of rows.

`registry` holds `load`, the sources by name and those without files; `arrays`, `image_datasets` and
`hugging_face` read the others; `given` converts objects that users hold; `dataset` is the common
form, with the options that all sources share; `images` decodes, `subset` draws rows and labels
clusters, and `writing` writes adapted samples. `commands.sides`, `commands.study`,
`extractors.embedding` and the entry points that take samples use them.
"""

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.registry import load
from otdd_flash.data.subset import with_pseudo_labels

__all__ = ["LabeledDataset", "load", "with_pseudo_labels"]
