from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_report_cases import Flow, blobs, image_flow
from matplotlib.figure import Figure
from PIL import Image

from otdd_flash.errors import InputError
from otdd_flash.report.flow import images as flow_images
from otdd_flash.report.flow.animation import CAPTION, FIRST_PAUSE, LAST_PAUSE, write_animation
from otdd_flash.report.flow.images import draw_images
from otdd_flash.samples import LabeledSamples

GREY, COLOUR = (1, 5, 4), (3, 4, 6)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    saved: list[Figure] = []
    save = flow_images.save_picture

    def keep(figure: Figure, path: Path) -> None:
        save(figure, path)
        saved.append(figure)

    monkeypatch.setattr(flow_images, "save_picture", keep)
    return saved


def draw(flow: Flow, shape: tuple[int, int, int], path: Path) -> None:
    draw_images(flow.source, flow.target, flow.trajectory, shape, path)


def grid(figure: Figure) -> dict[tuple[int, int], np.ndarray]:
    """Images by row and column of the page."""
    places = [(image.get_extent()[3], image.get_extent()[0]) for image in figure.axes[0].images]
    rows, columns = (sorted({place[k] for place in places}) for k in range(2))
    return {
        (rows.index(top), columns.index(left)): np.asarray(image.get_array())
        for (top, left), image in zip(places, figure.axes[0].images, strict=True)
    }


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_rows_are_particles_and_columns_steps(
    figures: list[Figure], tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    flow = image_flow(shape, classes=3, steps=10)
    draw(flow, shape, tmp_path / "i.png")
    cells = grid(figures[0])
    assert len(cells) == 12 * (8 + 2)
    levels = (flow.trajectory.points.clamp(0, 1) * 255).round().byte()
    assert bool((flow.trajectory.points < 0).any() and (flow.trajectory.points > 1).any())
    images = levels.reshape(11, 70, *shape).permute(0, 1, 3, 4, 2).squeeze(-1).numpy()
    flat = images[0].reshape(70, -1)
    particles = [
        int(np.flatnonzero((flat == cells[row, 0].ravel()).all(1)).item()) for row in range(12)
    ]
    assert flow.source.labels[particles].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for column, step in enumerate([0, 1, 3, 4, 6, 7, 9, 10]):
        for row, particle in enumerate(particles):
            np.testing.assert_array_equal(cells[row, column], images[step, particle])
    assert texts(figures[0])[:8] == ["step 0", "1", "3", "4", "6", "7", "9", "10"]
    assert texts(figures[0])[9:21] == ["class 0"] * 4 + ["class 1"] * 4 + ["class 2"] * 4


def test_the_last_columns_are_the_nearest_of_the_target(
    figures: list[Figure], tmp_path: Path
) -> None:
    flow = image_flow(GREY, classes=2)
    ends = flow.trajectory.points[-1]
    # Row 2 k lies where particle k ended and has its class, row 2 k + 1 a little off and another.
    features = torch.stack([ends, ends + 0.01], 1).flatten(0, 1)
    labels = torch.stack([flow.source.labels, 1 - flow.source.labels], 1).flatten()
    target = LabeledSamples(features, labels, ("like 0", "like 1"), name="mirror")
    draw(replace(flow, target=target), GREY, tmp_path / "i.png")
    cells = grid(figures[0])
    for row in range(12):
        np.testing.assert_array_equal(cells[row, 8], cells[row, 7])
        assert np.abs(cells[row, 9].astype(int) - cells[row, 7]).max() <= 3
    assert "nearest in the target" in texts(figures[0])
    assert texts(figures[0])[-13:-1] == ["like 0"] * 6 + ["like 1"] * 6


@pytest.mark.parametrize("classes", [None, 2])
def test_a_target_of_other_features_has_no_columns(
    figures: list[Figure], tmp_path: Path, classes: int | None
) -> None:
    flow = replace(image_flow(GREY, classes, steps=1), target=blobs(2, 7, 9, 0, "features"))
    draw(flow, GREY, tmp_path / "i.png")
    assert len(grid(figures[0])) == 12 * 2
    heads = ["step 0", "1"] + ([] if classes is None else ["class 0"] * 6 + ["class 1"] * 6)
    assert texts(figures[0])[:-1] == heads


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("classes", "shape"), [(None, (1, 2, 10)), (30, (3, 4, 4)), (3, (1, 1, 1))]
)
def test_nothing_leaves_the_page(
    figures: list[Figure], tmp_path: Path, classes: int | None, shape: tuple[int, int, int]
) -> None:
    flow = image_flow(shape, classes)
    long = tuple(f"{name} with $ and a long tail" for name in flow.source.class_names)
    draw(replace(flow, source=replace(flow.source, class_names=long)), shape, tmp_path / "i.png")
    (figure,) = figures
    width, height = figure.get_size_inches() * figure.dpi
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    boxes += [image.get_window_extent() for image in figure.axes[0].images]
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= width
        assert box.y1 <= height


@pytest.mark.parametrize(("shape", "mode"), [(GREY, "L"), (COLOUR, "RGB")])
def test_an_animation_has_a_frame_per_step_and_rests_at_both_ends(
    tmp_path: Path, shape: tuple[int, int, int], mode: str
) -> None:
    flow = image_flow(shape, steps=10)
    write_animation(flow.trajectory, shape, tmp_path / "flow.gif")
    with Image.open(tmp_path / "flow.gif") as gif:
        assert gif.n_frames == 11
        assert gif.info["loop"] == 0
        durations, frames = [], []
        for k in range(11):
            gif.seek(k)
            durations.append(gif.info["duration"])
            frames.append(np.asarray(gif.convert(mode)).astype(int))
    usual = durations[1]
    assert durations == [usual + FIRST_PAUSE, *[usual] * 9, usual + LAST_PAUSE]
    c, h, w = shape
    factor = frames[0].shape[1] // (8 * (w + 1) + 1)
    first = (flow.trajectory.points[:, 0].clamp(0, 1) * 255).round().reshape(11, c, h, w)
    for k in (0, 5, 10):
        corner = frames[k][CAPTION + factor :, factor:][
            : h * factor : factor, : w * factor : factor
        ]
        wanted = first[k].permute(1, 2, 0).squeeze(-1).numpy()
        # A palette of 256 colours has greys exactly and colours nearly.
        assert np.abs(corner - wanted).mean() <= (0 if c == 1 else 16)


def test_few_and_large_images_fill_the_width_they_need(tmp_path: Path) -> None:
    flow = image_flow((1, 3, 200), classes=None, steps=2)
    write_animation(flow.trajectory, (1, 3, 200), tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.size == (2 * 201 + 1, CAPTION + 2 * 4 + 1)
    few = replace(flow.trajectory, rows=torch.arange(1), points=flow.trajectory.points[:, :1, :4])
    write_animation(few, (1, 2, 2), tmp_path / "b.gif")
    with Image.open(tmp_path / "b.gif") as gif:
        assert gif.size == (4 * 120, CAPTION + 4 * 120)


def test_long_flows_have_sixty_frames_with_the_ends(tmp_path: Path) -> None:
    flow = image_flow((1, 2, 2), steps=130)
    write_animation(flow.trajectory, (1, 2, 2), tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 60


def test_what_are_no_images_is_refused(tmp_path: Path) -> None:
    flow = image_flow(GREY)
    for write in (
        lambda: draw(flow, COLOUR, tmp_path / "i.png"),
        lambda: write_animation(flow.trajectory, COLOUR, tmp_path / "i.gif"),
    ):
        with pytest.raises(InputError, match=r"20 values are no images of shape \(3, 4, 6\)"):
            write()
    assert not list(tmp_path.iterdir())
