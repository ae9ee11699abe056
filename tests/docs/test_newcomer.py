"""Every task of a first hour has a block of the documentation that runs where the package is.

That a block runs, and prints what it shows, is tested in test_pages.py.
"""

from __future__ import annotations

import re

import pytest
from page_blocks import ROOT, Block, all_blocks

# The page and the heading under which somebody would look, and what the block there has to do.
TASKS = {
    "a first distance": ("docs/index.md", "A first distance", r"otdd\.dataset_distance\("),
    "the same from a shell": ("docs/index.md", "A first distance", r"-m otdd_flash\.distance"),
    "two folders of images": ("docs/index.md", "Two folders of images", r'load\("image_folder"'),
    "folders from a shell": ("docs/index.md", "Two folders of images", "source=image_folder"),
    "arrays": ("docs/index.md", "Your own arrays", r"dataset_distance\(before, after"),
    "a csv file": ("docs/recipes.md", "A table", r"\.csv"),
    "text": ("docs/recipes.md", "Text", 'input="text"'),
    "Hugging Face on disk": ("docs/recipes.md", "A Hugging Face dataset", r"load\(\"huggingface\""),
    "Hugging Face in memory": (
        "docs/recipes.md",
        "A Hugging Face dataset",
        r"embed\(before, input=",
    ),
    "a torch dataset": ("docs/recipes.md", "A PyTorch dataset or a DataLoader", "ImageFolder"),
    "a DataLoader": ("docs/recipes.md", "A PyTorch dataset or a DataLoader", r"DataLoader\(target"),
    "a network of one's own": ("docs/recipes.md", "Your own network", "nn.Sequential"),
    "a pretrained network": (
        "docs/recipes.md",
        "A pretrained network without a hub",
        "extractor=efficientnet_lite0",
    ),
    "pretrained words": (
        "docs/recipes.md",
        "A pretrained network without a hub",
        "extractor=wordllama",
    ),
    "a loss": ("docs/recipes.md", "A loss in a training loop", "sinkhorn_loss"),
    "a flow": ("docs/flows.md", "", r"otdd\.gradient_flow\("),
    "a classifier on the moved rows": (
        "docs/recipes.md",
        "Train on the adapted dataset",
        r"LogisticRegression.*\.score\(test",
    ),
    "a study of one's own data": (
        "docs/studies.md",
        "Which of your datasets to train on first",
        r"otdd\.Study\(tasks",
    ),
    "contributions": ("docs/recipes.md", "Which rows carry the distance", r"\.contributions\(\)"),
    "several datasets": (
        "docs/recipes.md",
        "Which of several datasets is nearest to a target",
        r"otdd\.dataset_distance\(",
    ),
    "a table, a picture, JSON": (
        "docs/recipes.md",
        "A result as a table, a picture, JSON",
        r"to_frame\(\).*plot\(.*to_dict\(\)",
    ),
    "a sweep": ("docs/recipes.md", "A sweep over settings", r"--multirun"),
    "a tracker": ("docs/recipes.md", "Following a run in", "log=tensorboard"),
    "scikit-learn": ("docs/recipes.md", "A metric of torchmetrics", "TransportAdapter"),
    "a package of one's own": ("docs/extending.md", "A package of your own", "def read_ring"),
}


def heading_of(block: Block) -> str:
    """The heading above a block."""
    lines = (ROOT / block.page).read_text(encoding="utf-8").splitlines()[: block.line]
    return next((line for line in reversed(lines) if re.match("#{2,3} ", line)), "").lstrip("# ")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_of_the_first_hour_has_a_block_that_runs(task: str) -> None:
    page, heading, does = TASKS[task]
    here = [
        block
        for block in all_blocks()
        if block.page == page and block.mark is None and heading_of(block).startswith(heading)
    ]
    assert [b for b in here if re.search(does, b.code, re.S)], [b.name for b in here]
