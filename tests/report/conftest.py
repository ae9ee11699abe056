"""Figures that reports would save, kept for measuring what stands on them."""

import pytest

DRAWING = ("distance.contributions", "distance.heat_maps", "distance.projections")
DRAWING += ("flow.images", "flow.objective", "flow.paths", "sweep")


@pytest.fixture
def figures(monkeypatch):
    saved = []

    def keep(figure, path):
        saved.append(figure)

    for name in DRAWING:
        monkeypatch.setattr(f"otdd_flash.report.{name}.save_picture", keep)
    return saved
