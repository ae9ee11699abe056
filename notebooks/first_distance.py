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
# # A first distance
#
# Two halves of scikit-learn's digits are compared. The second half is rotated by 30 degrees, so that the images differ
# but the classes are the same ten digits. Nothing is downloaded.

# %%
import matplotlib.pyplot as plt

import otdd_flash as otdd

source_images = otdd.load("digits", split="train")
target_images = otdd.load("digits", split="test", rotate=30)
print(len(source_images), "and", len(target_images), "images of", source_images.class_names)

# %% [markdown]
# A distance needs points. `embed` applies an extractor to every input; `pixels` takes the grey values, here 64 of each
# image.

# %%
pixels = otdd.extractors.pixels()
source = otdd.embed(source_images, pixels)
target = otdd.embed(target_images, pixels)
print(tuple(source.features.shape), tuple(target.features.shape))

# %% [markdown]
# The distance comes with solver bounds: an interval that holds the exact value of these rows at this epsilon. What other
# rows of the same datasets would give is another question, which `otdd.subsample_interval` answers.

# %%
result = otdd.dataset_distance(source, target, epsilon=0.1)
lower, upper = result.bounds
print(f"{result.value:.3f} [{lower:.3f}, {upper:.3f}], converged: {result.converged}")

# %% [markdown]
# Why is it not 0? The cost of moving a point has two parts: its features change and its class changes. `W` holds the
# squared distances between classes. An upright 1 lies nearer to the rotated 7s than to the rotated 1s.

# %%
for row in result.class_distances.nearest():
    if row.side == "source":
        print(f"{row.name} is nearest to rotated {row.nearest} at {row.distance:.2f}")

# %% [markdown]
# Where the mass goes: row i of the class coupling says how the mass of class i is spread over the target's classes. Most
# of it stays on the diagonal.

# %%
coupling = result.class_coupling()
print(f"{coupling.diagonal().sum():.0%} of the mass stays in its class")
figure, axes = plt.subplots(figsize=(6, 5), dpi=100, layout="constrained")
image = axes.imshow(100 * coupling.numpy(), cmap="Blues", aspect="auto")
axes.set_xticks(range(10), result.class_names[1])
axes.set_yticks(range(10), result.class_names[0])
axes.set_xlabel("rotated digit")
axes.set_ylabel("digit")
figure.colorbar(image, label="mass, % of the total")
plt.show()

# %% [markdown]
# Is that far? A yardstick is what two halves of one dataset differ by.

# %%
upright = otdd.embed(otdd.load("digits", split="test"), pixels)
floor = otdd.dataset_distance(source, upright, epsilon=0.1)
print(f"without the rotation {floor.value:.3f}, with it {result.value:.3f}")
