"""Do contributions find rows whose label is wrong?

    python -m experiments.flipped_labels --data-root DIR [--samples 5000] [--output DIR]

Of 5,000 rows of Fashion-MNIST's training split a quarter gets the label of another class; the
reference is 5,000 other rows with their labels. Rows are ranked by

    contributions       s of `DistanceResult.contributions()`, without debiasing and with it
    held                the same without debiasing, class distances held
    lava                the calibrated gradient of Just et al. 2023 from the potential of geomloss's
                        default solve (blur 0.05, scaling 0.5), class distances held
    knn                 the share of the 10 nearest reference rows with another label

and the area under the ROC curve is reported with the difference of the first to `lava`, in an
interval of 95% by 2,000 paired bootstrap draws of rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.data.subset import stratified_rows

FLIPPED, NEIGHBOURS, DRAWS = 0.25, 10, 2000
EPSILON_RELATIVE = 0.01
# Of geomloss's default blur 0.05, for the squared distance.
GEOMLOSS_EPSILON = 0.05**2
NAME = "flipped_labels"

Scores = NDArray[np.float64]


def datasets(
    root: str, samples: int, seed: int
) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples, NDArray[np.bool_]]:
    """Rows of which some have wrong labels, a clean reference, and which labels are wrong."""
    pixels = otdd.extractors.pixels()
    whole = otdd.embed(otdd.load("fashion_mnist", root=root), pixels)
    assert whole.labels is not None
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(stratified_rows(whole.labels.numpy(), 2 * samples, generator))
    noisy, clean = (whole.take(torch.from_numpy(half)) for half in np.split(chosen, 2))
    assert noisy.labels is not None
    wrong = generator.permutation(samples) < round(FLIPPED * samples)
    shift = torch.from_numpy(generator.integers(1, 10, samples))
    labels = torch.where(torch.from_numpy(wrong), (noisy.labels + shift) % 10, noisy.labels)
    noisy = otdd.LabeledSamples(noisy.features, labels, noisy.class_names, name="noisy")
    return noisy, clean, wrong


def scores_of(noisy: otdd.LabeledSamples, clean: otdd.LabeledSamples) -> dict[str, Scores]:
    """What every way of ranking says of every row; large where it holds a label for wrong."""
    plain = otdd.dataset_distance(noisy, clean, epsilon_relative=EPSILON_RELATIVE, debias=False)
    debiased = otdd.dataset_distance(noisy, clean, epsilon=plain.epsilon)
    geomloss = otdd.dataset_distance(
        noisy,
        clean,
        epsilon=GEOMLOSS_EPSILON,
        class_distances=plain.class_distances,
        debias=False,
        solver=otdd.GeomlossSchedule(),
    )
    found = {
        "contributions": plain.contributions().values,
        "debiased": debiased.contributions().values,
        "held": calibrated(plain.potentials[0]),
        "lava": calibrated(geomloss.potentials[0]),
        "knn": other_labels(noisy, clean),
    }
    return {name: values.cpu().double().numpy() for name, values in found.items()}


def calibrated(potential: Tensor) -> Tensor:
    """f_i less the mean of all others."""
    f = potential.double()
    return f - (f.sum() - f) / (len(f) - 1)


def other_labels(noisy: otdd.LabeledSamples, clean: otdd.LabeledSamples) -> Tensor:
    """The share of the nearest reference rows with another label."""
    assert noisy.labels is not None
    assert clean.labels is not None
    nearest = torch.cdist(noisy.features, clean.features).topk(NEIGHBOURS, largest=False).indices
    return (clean.labels[nearest] != noisy.labels[:, None]).double().mean(1)


def bootstrap(wrong: NDArray[np.bool_], one: Scores, other: Scores) -> tuple[float, float]:
    """The 95% interval of the difference of two areas, rows drawn in pairs."""
    generator = np.random.default_rng(0)
    differences = []
    for _ in range(DRAWS):
        rows = generator.integers(len(wrong), size=len(wrong))
        areas = [roc_auc_score(wrong[rows], side[rows]) for side in (one, other)]
        differences.append(areas[0] - areas[1])
    low, high = np.quantile(differences, (0.025, 0.975))
    return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="wrong labels found by contributions")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    noisy, clean, wrong = datasets(given.data_root, given.samples, given.seed)
    scores = scores_of(noisy, clean)
    areas: dict[str, Any] = {
        name: float(roc_auc_score(wrong, values)) for name, values in scores.items()
    }
    low, high = bootstrap(wrong, scores["contributions"], scores["lava"])
    for name, area in areas.items():
        print(f"{name:15} AUROC {area:.4f}")
    gap = areas["contributions"] - areas["lava"]
    print(f"contributions - lava: {gap:+.4f} [{low:+.4f}, {high:+.4f}]")
    content = {
        "samples": given.samples,
        "seed": given.seed,
        "flipped": FLIPPED,
        "epsilon_relative": EPSILON_RELATIVE,
        "auroc": areas,
        "contributions_less_lava": {"lower": low, "upper": high},
        "seconds": time.perf_counter() - started,
        **environment("scikit-learn"),
    }
    write_result(NAME, content, given.output)


if __name__ == "__main__":
    main()
