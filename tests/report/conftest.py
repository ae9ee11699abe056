"""Pictures in the style of reports, and figures that reports would save, kept for measuring."""

import pytest

from otdd_flash.report.page import own_style


@pytest.fixture
def styled():
    """Figures are drawn in the style of reports."""
    with own_style():
        yield


@pytest.fixture
def figures(styled, monkeypatch):
    """The figures that a report has drawn, none of which is written."""
    saved = []
    monkeypatch.setattr(
        "otdd_flash.report.page.save_picture", lambda figure, path: saved.append(figure)
    )
    return saved
