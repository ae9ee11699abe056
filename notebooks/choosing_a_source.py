# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choosing a source dataset
#
# Given a target dataset with few labels and several sources to train on first: does the distance tell which? Here the
# target is digits rotated by 30 degrees, and the sources are other draws of the digits.

# %%
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

import otdd_flash as otdd

pixels = otdd.extractors.pixels()
target = otdd.embed(otdd.load("digits", split="test", rotate=30), pixels)
sources = {
    f"rotated by {angle}": otdd.embed(
        otdd.load("digits", split="train", rotate=angle, max_samples=400), pixels
    )
    for angle in (0, 15, 45, 60, 90)
}

# %% [markdown]
# `pairwise_distances` compares all datasets at once and shares what they have in common. The last one is the target.

# %%
found = otdd.pairwise_distances([*sources.values(), target], epsilon=0.1)
distances = dict(zip(sources, found.values[:-1, -1].tolist(), strict=True))
for name in sorted(distances, key=distances.__getitem__):
    print(f"{name}: {distances[name]:.2f}")

# %% [markdown]
# What training on each source gives, without any row of the target:

# %%
accuracies = {}
for name, samples in sources.items():
    model = LogisticRegression(max_iter=2000).fit(samples.features, samples.labels)
    accuracies[name] = model.score(target.features, target.labels)
for name in sorted(accuracies, key=accuracies.__getitem__, reverse=True):
    print(f"{name}: {accuracies[name]:.0%}")

# %% [markdown]
# Both lists agree in their order or nearly so. That is no surprise for rotations of one dataset, and five sources prove
# nothing in general: in the project's study of twelve tasks from four datasets, distances between pixels did not tell which
# source helps. `otdd.Study` and `python -m otdd_flash.study` measure it for tasks of yours, with intervals over datasets.

# %%
names = list(sources)
correlation = spearmanr([distances[n] for n in names], [accuracies[n] for n in names]).statistic
print(f"rank correlation of distance and accuracy: {correlation:.1f}")
