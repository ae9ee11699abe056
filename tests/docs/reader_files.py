"""What a reader of the pages has: folders of images, tables, texts and a module of features."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

FEATURES = '''"""Features of a reader's own."""

import numpy as np


def features(images):
    """Mean colours of quarters, (b, 12)."""
    sized = [np.asarray(image.convert("RGB").resize((2, 2)), dtype="float32") for image in images]
    return np.stack(sized).reshape(len(sized), -1) / 255
'''


def write_files(folder: Path) -> None:
    """Write all that the pages name, a few rows of each."""
    draw = np.random.default_rng(0)
    for season, light in (("summer", 170), ("winter", 90)):
        for number, kind in enumerate(("cat", "dog", "bird")):
            place = folder / "photos" / season / kind
            place.mkdir(parents=True)
            for i in range(6):
                level = light + 25 * number + draw.integers(-20, 20, size=(12 + i, 14, 3))
                Image.fromarray(level.astype(np.uint8)).save(place / f"{i}.png")
    other = np.random.default_rng(1)
    for year in (2023, 2024):
        late = year == 2024
        rows = pd.DataFrame(
            {
                "age": draw.integers(18, 80, size=90) + 5 * late,
                "income": draw.normal(40e3 + 5e3 * late, 9e3, size=90).round(),
                "segment": np.tile(["new", "loyal", "lost"], 30),
            }
        )
        rows.to_csv(folder / f"customers_{year}.csv", index=False)
        words = ["good", "bad", "slow", "fast", "friendly", "broken", "cheap", "late"]
        texts = [" ".join(draw.choice(words[late:], size=6)) for _ in range(40)]
        stars = [f"{1 + i % 2} stars" for i in range(40)]
        pd.DataFrame({"text": texts, "stars": stars}).to_csv(
            folder / f"reviews_{year}.csv", index=False
        )
        tags = [["cat"], ["cat", "snow"], ["snow"], ["dog", "snow"], ["dog"]]
        album = folder / "albums" / str(year)
        album.mkdir(parents=True)
        lines = []
        for i in range(20):
            level = other.integers(40, 160 + 40 * late, size=(9, 10, 3))
            Image.fromarray(level.astype(np.uint8)).save(album / f"{i}.png")
            lines.append(json.dumps({"file_name": f"{i}.png", "tags": tags[i % 5]}))
        (album / "metadata.jsonl").write_text("\n".join(lines))
        rooms, area = other.integers(1, 7, size=60), other.normal(90, 20, size=60).round(1)
        houses = pd.DataFrame({"rooms": rooms, "area": area})
        houses["price"] = (2.5 + 0.1 * late) * area + 20.25 * rooms
        houses.to_csv(folder / f"houses_{year}.csv", index=False)
    parents = "name,parent\ncat,pet\ndog,pet\npet,animal\nbird,animal\n"
    (folder / "animals.csv").write_text(parents)
    for number, camera in enumerate(("gate", "yard", "roof", "river")):
        for kind, colour in (("cat", 0), ("dog", 1)):
            place = folder / "cameras" / camera / kind
            place.mkdir(parents=True)
            for i in range(20):
                level = draw.integers(40, 120 + 20 * number, size=(9, 10, 3))
                level[..., colour] += 60
                Image.fromarray(level.astype(np.uint8)).save(place / f"{i}.png")
    (folder / "clinics").mkdir()
    for number, clinic in enumerate(("north", "south", "east", "west")):
        well = np.arange(80) % 2
        rows = pd.DataFrame(
            {
                "age": draw.integers(30, 90, size=80) - 5 * well,
                "pulse": draw.normal(70 + 3 * number + 8 * well, 12, size=80).round(),
                "outcome": np.where(well, "well", "ill"),
            }
        )
        rows.to_csv(folder / "clinics" / f"{clinic}.csv", index=False)
    (folder / "my_features.py").write_text(FEATURES)
