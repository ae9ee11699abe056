"""Every task of a first hour has a block of the documentation that runs where the package is.

That a block runs, and prints what it shows, is tested in test_pages.py.
"""

from __future__ import annotations

import re

from page_blocks import ROOT, Block, all_blocks

# A task; the page and the heading under which somebody would look; what the block there does.
TASKS = r"""
a first distance | index | A first distance | otdd\.dataset_distance\(
the same from a shell | index | A first distance | -m otdd_flash\.distance
two folders of images | index | Two folders of images | load\("image_folder"
folders from a shell | index | Two folders of images | source=image_folder
arrays | index | Your own arrays | dataset_distance\(before, after
a csv file | recipes | A table | \.csv
text | recipes | Text | input="text"
Hugging Face on disk | recipes | A Hugging Face dataset | load\("huggingface"
Hugging Face in memory | recipes | A Hugging Face dataset | embed\(before, input=
a torch dataset | recipes | A PyTorch dataset or a DataLoader | ImageFolder
a DataLoader | recipes | A PyTorch dataset or a DataLoader | DataLoader\(target
a network of one's own | recipes | Your own network | nn.Sequential
a pretrained network | recipes | A pretrained network without a hub | extractor=efficientnet_lite0
pretrained words | recipes | A pretrained network without a hub | extractor=wordllama
a loss | recipes | A loss in a training loop | sinkhorn_loss
a flow | flows |  | otdd\.gradient_flow\(
a classifier on the moved rows | recipes | Train on the ada | LogisticRegression.*\.score\(test
a study of one's own data | studies | Which of your datasets to train on first | otdd\.Study\(tasks
contributions | recipes | Which rows carry the distance | \.contributions\(\)
several datasets | recipes | Which of several datasets is nearest | otdd\.dataset_distance\(
a table, a picture, JSON | recipes | A result as a table, | to_frame\(\).*plot\(.*to_dict\(\)
a sweep | recipes | A sweep over settings | --multirun
a tracker | recipes | Following a run in | log=tensorboard
scikit-learn | recipes | A metric of torchmetrics | TransportAdapter
a package of one's own | extending | A package of your own | def read_ring
"""


def heading_of(block: Block) -> str:
    """The heading above a block."""
    lines = (ROOT / block.page).read_text(encoding="utf-8").splitlines()[: block.line]
    return next((line for line in reversed(lines) if re.match("#{2,3} ", line)), "").lstrip("# ")


def test_every_task_of_the_first_hour_has_a_block_that_runs() -> None:
    blocks = [(block, heading_of(block)) for block in all_blocks() if block.mark is None]
    for line in TASKS.strip().splitlines():
        _, page, heading, does = line.split(" | ")
        here = [
            block
            for block, above in blocks
            if block.page == f"docs/{page}.md" and above.startswith(heading)
        ]
        assert [b for b in here if re.search(does, b.code, re.S)], line
