"""Figures that reports would save, kept for measuring what stands on them."""

import pytest

from otdd_flash.report.page import own_style

DRAWING = ("distance", "heat_maps", "flow", "flow_pictures", "sweep")


@pytest.fixture
def figures(monkeypatch):
    saved = []

    def keep(figure, path):
        saved.append(figure)

    for name in DRAWING:
        monkeypatch.setattr(f"otdd_flash.report.{name}.save_picture", keep)
    with own_style():
        yield saved
