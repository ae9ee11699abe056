"""Labelled datasets: the sources of raw inputs and labels, and the choice of rows.

`registry` holds `load` and the sources by name; `arrays`, `image_folder`,
`image_datasets`, `hugging_face` and `digits` read them; `given` converts objects that users
hold; `dataset` is the common form, `images` decodes, `subset` draws rows, `pseudo_labels` clusters,
`request` holds the options that all sources share, and `writing` writes adapted samples.
`commands.sides`, `commands.study`, `extractors.embedding` and the entry points that take samples
use them.
"""

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.pseudo_labels import with_pseudo_labels
from otdd_flash.data.registry import load

__all__ = ["LabeledDataset", "load", "with_pseudo_labels"]
