"""Figures that reports would save, kept for measuring what stands on them."""

import pytest

DRAWING = ("contributions", "distance", "figures.heat_maps")
DRAWING += ("flow.images", "flow.objective", "flow.paths", "sweep")


@pytest.fixture
def figures(monkeypatch):
    saved = []

    def keep(figure, path):
        saved.append(figure)

    for name in DRAWING:
        monkeypatch.setattr(f"otdd_flash.report.{name}.save_picture", keep)
    return saved
