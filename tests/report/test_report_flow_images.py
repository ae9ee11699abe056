"""Pictures and animations of flows whose particles are images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flow_report_cases import blobs, image_flow
from picture_checks import check_on_page
from PIL import Image

from otdd_flash.errors import InputError
from otdd_flash.report.figures.page import TARGET_COLOR
from otdd_flash.report.flow import animation
from otdd_flash.report.flow.animation import BACKGROUND, FIRST_PAUSE, LAST_PAUSE, write_animation
from otdd_flash.report.flow.images import draw_images
from otdd_flash.samples import LabeledSamples

GREY, COLOUR = (1, 5, 4), (3, 4, 6)


def draw(flow, shape, path):
    draw_images(flow.source, flow.target, flow.trajectory, shape, path)


def animate(flow, shape, path):
    """The frames of the GIF, RGB."""
    write_animation(flow.source, flow.target, flow.trajectory, shape, path)
    frames = []
    with Image.open(path) as gif:
        for k in range(gif.n_frames):
            gif.seek(k)
            frames.append(np.asarray(gif.convert("RGB")).astype(int))
    return frames


def cells(frame, shape, side, rows, strip):
    """Where images are in a frame, by its bottom left corner."""
    _, h, w = shape
    factor = ((animation.WIDTH - animation.GAP) // side - animation.GAP) // w
    down, across = h * factor + strip + animation.GAP, w * factor + animation.GAP
    first = frame.shape[0] - rows * down + strip
    return [
        (
            slice(first + row * down, first + row * down + h * factor),
            slice(animation.GAP + k * across, animation.GAP + k * across + w * factor),
        )
        for row in range(rows)
        for k in range(side)
    ]


def grid(figure):
    """Images by row and column of the page."""
    places = [(image.get_extent()[3], image.get_extent()[0]) for image in figure.axes[0].images]
    rows, columns = (sorted({place[k] for place in places}) for k in range(2))
    return {
        (rows.index(top), columns.index(left)): np.asarray(image.get_array())
        for (top, left), image in zip(places, figure.axes[0].images, strict=True)
    }


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_rows_are_particles_columns_steps_and_the_last_the_nearest_of_the_target(figures, shape):
    flow = image_flow(shape, classes=2, steps=10)
    ends = flow.trajectory.points[-1]
    # Row 2 k lies where particle k ended and has its class, row 2 k + 1 a little off and another.
    features = torch.stack([ends, ends + 0.01], 1).flatten(0, 1)
    labels = torch.stack([flow.source.labels, 1 - flow.source.labels], 1).flatten()
    target = LabeledSamples(features, labels, ("like 0", "like 1"), name="mirror")
    draw(replace(flow, target=target), shape, None)
    (figure,) = figures
    cells = grid(figure)
    assert len(cells) == 12 * (8 + 2)
    levels = (flow.trajectory.points.clamp(0, 1) * 255).round().byte()
    assert bool((flow.trajectory.points < 0).any() and (flow.trajectory.points > 1).any())
    images = levels.reshape(11, 70, *shape).permute(0, 1, 3, 4, 2).squeeze(-1).numpy()
    flat = images[0].reshape(70, -1)
    particles = [
        int(np.flatnonzero((flat == cells[row, 0].ravel()).all(1)).item()) for row in range(12)
    ]
    assert flow.source.labels[particles].tolist() == [0] * 6 + [1] * 6
    for column, step in enumerate([0, 1, 3, 4, 6, 7, 9, 10]):
        for row, particle in enumerate(particles):
            np.testing.assert_array_equal(cells[row, column], images[step, particle])
    for row in range(12):
        np.testing.assert_array_equal(cells[row, 8], cells[row, 7])
        assert np.abs(cells[row, 9].astype(int) - cells[row, 7]).max() <= 3
    said = texts(figure)
    assert said[:8] == ["step 0", "1", "3", "4", "6", "7", "9", "10"]
    assert said[9:21] == ["class 0"] * 6 + ["class 1"] * 6
    assert "nearest in the target" in said
    assert said[-13:-1] == ["like 0"] * 6 + ["like 1"] * 6


@pytest.mark.slow
@pytest.mark.parametrize("classes", [None, 2])
def test_a_target_of_other_features_has_no_columns(figures, classes):
    flow = replace(image_flow(GREY, classes, steps=1), target=blobs(2, 7, 9, 0, "features"))
    draw(flow, GREY, None)
    assert len(grid(figures[0])) == 12 * 2
    heads = ["step 0", "1"] + ([] if classes is None else ["class 0"] * 6 + ["class 1"] * 6)
    assert texts(figures[0])[:-1] == heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "shape"), [(None, (1, 2, 10)), (30, (3, 4, 4)), (3, (1, 1, 1))]
)
def test_nothing_leaves_the_page(figures, classes, shape):
    flow = image_flow(shape, classes, steps=8)
    long = tuple(f"{name} with $ and a long tail" for name in flow.source.class_names)
    draw(replace(flow, source=replace(flow.source, class_names=long)), shape, None)
    (figure,) = figures
    check_on_page(figure, [*figure.axes[0].texts, *figure.axes[0].images])


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_an_animation_has_a_frame_per_step_and_rests_at_both_ends(tmp_path, shape):
    flow = image_flow(shape, steps=3)
    frames = animate(flow, shape, tmp_path / "flow.gif")
    with Image.open(tmp_path / "flow.gif") as gif:
        assert gif.n_frames == 4
        assert gif.info["loop"] == 0
        durations = []
        for k in range(4):
            gif.seek(k)
            durations.append(gif.info["duration"])
    usual = durations[1]
    assert durations == [usual + FIRST_PAUSE, usual, usual, usual + LAST_PAUSE]
    c, h, w = shape
    first = (flow.trajectory.points[:, 0].clamp(0, 1) * 255).round().reshape(4, c, h, w)
    for k in (0, 2, 3):
        corner = frames[k][cells(frames[k], shape, 8, 8, animation.STRIP)[0]]
        factor = corner.shape[0] // h
        wanted = first[k].permute(1, 2, 0).expand(h, w, 3).numpy()
        off = np.abs(corner[::factor, ::factor] - wanted)
        # A palette of 256 colours has greys but one exactly and colours nearly.
        assert off.max() <= 1 if c == 1 else off.mean() <= 16


def one_particle(flow):
    path = flow.trajectory
    few = replace(path, rows=path.rows[:1], points=path.points[:, :1, :4])
    return replace(flow, trajectory=few)


@pytest.mark.slow
def test_few_and_large_images_fill_the_width_they_need(tmp_path):
    flow = image_flow((1, 3, 200), classes=None, steps=1)
    line = animation.LINE + 5
    (large, *_) = animate(flow, (1, 3, 200), tmp_path / "a.gif")
    assert large.shape[:2] == (line + 4 + 2 * 7, 4 + 2 * 204)
    (one, *_) = animate(one_particle(flow), (1, 2, 2), tmp_path / "b.gif")
    assert one.shape[:2] == (line + 4 + 592 + 4, 4 + 592 + 4)
    # Long flows have sixty frames.
    flow = one_particle(image_flow((1, 2, 2), classes=None, steps=130))
    assert len(animate(flow, (1, 2, 2), tmp_path / "a.gif")) == 60


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_images_that_their_label_no_longer_fits_are_framed_below_their_label(tmp_path, shape):
    flow = image_flow(shape, classes=2, steps=1)
    names = "WWWWWWWWWWWWWWWWWWWWW", "g" * 300
    # All end where an image of class 1 is, and began as one of their own class.
    target = LabeledSamples(flow.trajectory.points[-1], torch.zeros(70).long(), names[1:])
    long = replace(flow.source, class_names=names)
    frames = animate(replace(flow, target=target, source=long), shape, tmp_path / "a.gif")
    color = [int(TARGET_COLOR[k : k + 2], 16) for k in (1, 3, 5)]
    for frame, first_marked in ((frames[0], False), (frames[-1], True)):
        for k, (rows, columns) in enumerate(cells(frame, shape, 8, 8, animation.STRIP)):
            middle = (rows.start + rows.stop) // 2
            side = frame[middle, columns.start - 2]
            assert (np.abs(side - color).max() <= 8) == (first_marked and k < 32), k
            strip = frame[rows.start - animation.STRIP : rows.start]
            between = strip[:, columns.stop : columns.stop + animation.GAP]
            assert first_marked or (between == BACKGROUND).all()
            assert (strip[:, columns] < 100).any()


def test_the_caption_says_what_stands_above_images_and_what_a_mark_means(tmp_path, monkeypatch):
    seen = []

    def frame(images, side, labels, marked, caption):
        seen.append((labels, caption))
        return Image.new("L", (2, 2)), np.zeros((2, 2), bool)

    monkeypatch.setattr(animation, "_frame", frame)
    two = "class 0", "class 1"
    for names, labelled, d, compared in (
        (("class 0", "other"), True, 20, True),
        (("left", "right"), True, 20, False),
        (two, True, 19, False),
        ((), True, 20, False),
        (two, False, 20, False),
    ):
        flow = image_flow(GREY, classes=2 if labelled else None, steps=1)
        target = replace(blobs(2 if names else None, d, 9, 0, "target"), class_names=names)
        seen.clear()
        write_animation(flow.source, target, flow.trajectory, GREY, tmp_path / "a.gif")
        (labels, (first, legend)), _ = seen
        assert labels == (["class 0"] * 32 + ["class 1"] * 32 if labelled else []), names
        assert first == ("step 0 of 1, 0 of 64 marked" if compared else "step 0 of 1"), names
        assert legend.startswith("above each image: its label") == labelled
        assert ("orange frame and ≠: the nearest of both" in legend) == compared, names


def test_what_are_no_images_is_refused(tmp_path):
    for write in (draw, animate):
        with pytest.raises(InputError, match=r"20 values are no images of shape \(3, 4, 6\)"):
            write(image_flow(GREY), COLOUR, tmp_path / "i.png")
    assert not list(tmp_path.iterdir())
