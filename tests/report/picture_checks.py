"""Where things stand on a page."""

from itertools import combinations

from matplotlib.text import Text


def check_on_page(figure, things):
    """All things (texts, images) lie on the figure's page, once it is laid out."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for thing in things:
        box = thing.get_window_extent()
        assert min(box.x0, box.y0) >= 0, thing
        assert box.x1 <= width, thing
        assert box.y1 <= height, thing


def check_apart(things):
    """No two things overlap."""
    # The line from a name to its point may cross other names.
    boxes = [
        (one, (Text if isinstance(one, Text) else type(one)).get_window_extent(one))
        for one in things
    ]
    for (one, a), (other, b) in combinations(boxes, 2):
        crossing = a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1
        assert not crossing, (one, other)
