"""The site: every key is described, formulas are MathML, and pages load nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for path in (ROOT / "conf").rglob("*.yaml")
    # These only name a file of conf/dataset.
    if path.parent.name not in ("source", "target", "reference", "sample")
)


def test_what_a_page_loads_from_elsewhere_is_found(hook, tmp_path):
    foreign = hook("foreign")
    for page in (
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img srcset="a.png 1x, https://example.org/a.png 2x">',
        '<p style="background: url(https://example.org/a.png)">',
        "<style>@import 'https://example.org/a.css';</style>",
        '<svg><use xlink:href="https://example.org/a.svg#b"/></svg>',
    ):
        (found,) = foreign.loaded(page)
        assert "example.org" in found, page
    # Links and files of the site are not foreign; style sheets are read as well.
    page = '<a href="https://example.org">there</a><script src="a.js"></script><img src="data:A">'
    assert foreign.loaded(page) == []
    (tmp_path / "a.css").write_text("@import 'https://example.org/a.css'; p { color: red }")
    assert foreign.foreign(tmp_path) == ["a.css: https://example.org/a.css"]


def test_formulas_become_mathml(hook):
    pytest.importorskip("latex2mathml", reason="comes with the extra docs; `make docs` needs it")
    page = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p>'
    built = hook("formulas").mathml(page)
    assert "<math" in built
    assert "arithmatex" not in built
    assert "&#x0003C;" in built or "&lt;" in built


def test_every_key_has_a_description_and_a_row(hook):
    tables = hook("settings_tables")
    text = tables.tables()
    for path in FILES:
        rows = [row for row in tables.settings(path) if row.key not in tables._CHOICES]
        assert [row.key for row in rows if not row.description] == [], path
        assert [row.key for row in rows if f"{row.key}` |" not in text] == [], path


@pytest.mark.slow
def test_the_tables_hold_the_defaults_of_the_composed_configuration(hook):
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    tables = hook("settings_tables")
    with initialize_config_module("otdd_flash.conf", version_base="1.3"):
        for command in ("distance", "flow", "study", "nearest", "mix", "shift"):
            config = compose(command)
            for row in tables.settings(ROOT / "conf" / f"{command}.yaml"):
                value = OmegaConf.to_yaml(
                    OmegaConf.create({"value": OmegaConf.select(config, row.key)})
                )
                assert value == OmegaConf.to_yaml(OmegaConf.create(f"value: {row.default}")), (
                    row.key
                )


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_loads_nothing_from_elsewhere_and_its_links_lead_somewhere(hook, site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    assert hook("foreign").foreign(site) == []
    for page in pages:
        text = page.read_text("utf-8")
        # A formula such as <x, y> that was taken for a tag would not be seen.
        assert not re.search(r"<[A-Za-z]+[,;]", text), page.name
        # Every page's own links lead to files that are there.
        for link in re.findall(r'(?:href|src)="([^"#?:]+)(?:[#?][^"]*)?"', text):
            assert link.startswith("/") or (page.parent / link).exists(), f"{page.name}: {link}"
