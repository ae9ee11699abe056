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
# # A flow
#
# A gradient flow moves the points of one dataset along the gradient of its distance to another one. Row i of the result
# is row i of the source, moved, with its label. Here digits move towards rotated digits.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

import otdd_flash as otdd

pixels = otdd.extractors.pixels()


def draw(split, rotate):
    """Embed 400 rows of a split, and the rows that are left."""
    whole = otdd.load("digits", split=split, rotate=rotate)
    drawn = otdd.load("digits", split=split, rotate=rotate, max_samples=400)
    rest = whole.take(np.flatnonzero(~np.isin(whole.rows, drawn.rows)))
    return otdd.embed(drawn, pixels), otdd.embed(rest, pixels)


source, other_source = draw("train", 0)
target, other_target = draw("test", 30)

# %% [markdown]
# Ten steps, each a fifth of what is left of the way. `box` keeps grey values between 0 and 1.

# %%
moves = otdd.Flow(steps=10, stepping=otdd.Stepping(0.2, box=(0, 1)))
flow = otdd.gradient_flow(source, target, moves, epsilon=0.1)
print(f"from {flow.before.divergence:.2f} to {flow.after.divergence:.2f}")
for record in flow.history[::3]:
    print(f"step {record.step}: {record.divergence:.3f} [{record.lower:.3f}, {record.upper:.3f}]")

# %% [markdown]
# The images with their labels, before (above) and after (below):

# %%
figure, axes = plt.subplots(2, 6, figsize=(6, 2.4), dpi=100, layout="constrained")
for line, samples in zip(axes, (flow.source, flow.samples), strict=True):
    for image, axis, label in zip(samples.features, line, samples.labels.tolist(), strict=False):
        axis.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(samples.class_names[label])
        axis.axis("off")
plt.show()

# %% [markdown]
# What it is good for: a classifier trained on the moved digits reads rotated digits better than one trained on upright
# digits. The flow has seen the target's labels, so a classifier trained on these is what it can reach. It is
# tested on rotated digits that neither the flow nor a classifier has seen.

# %%
for name, samples in (("upright", source), ("moved", flow.samples), ("target", target)):
    model = LogisticRegression(max_iter=2000).fit(samples.features, samples.labels)
    print(f"trained on {name}: {model.score(other_target.features, other_target.labels):.1%}")

# %% [markdown]
# New points follow by a map: each copies the displacement of the nearest particle of its class. Neither they
# nor the rotated digits that they are compared with took part in the flow.

# %%
moved = flow.map("nearest")(other_source)
before = otdd.dataset_distance(other_source, other_target, epsilon=0.1).value
after = otdd.dataset_distance(moved, other_target, epsilon=0.1).value
print(f"{before:.2f} before, {after:.2f} after")
