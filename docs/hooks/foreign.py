"""After the build: every page is opened, and none may load anything from another machine."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# What a browser fetches by itself: (element, attribute). A link that a reader may follow is none.
_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "src"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("video", "src"),
    ("video", "poster"),
    ("audio", "src"),
    ("image", "href"),
    ("use", "href"),
    ("input", "src"),
}
# Relations of a <link> that name another page and load nothing.
_NAMED_ONLY = {"canonical", "next", "prev", "alternate", "author", "license", "edit"}
_ELSEWHERE = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", re.I)
_IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", re.I)


def on_post_build(config: Any, **_: Any) -> None:
    """End the build where a page or a style sheet loads something from elsewhere."""
    from mkdocs.exceptions import PluginError

    found = foreign(Path(config["site_dir"]))
    if found:
        raise PluginError("loaded from elsewhere: " + "; ".join(found))


def foreign(site: Path) -> list[str]:
    """What the pages and style sheets of a folder load from other machines, each with its file."""
    found = []
    for page in sorted(site.rglob("*.html")):
        found += [f"{page.relative_to(site)}: {url}" for url in loaded(page.read_text("utf-8"))]
    for sheet in sorted(site.rglob("*.css")):
        urls = _of_style(sheet.read_text("utf-8"))
        found += [f"{sheet.relative_to(site)}: {url}" for url in urls]
    return found


def loaded(page: str) -> list[str]:
    """The addresses on other machines that a page of HTML would load from."""
    parser = _Loads()
    parser.feed(page)
    parser.close()
    return [url for url in parser.urls if _ELSEWHERE.match(url)]


def _of_style(style: str) -> list[str]:
    urls = (one or other for one, other in _IN_STYLE.findall(style))
    return [url for url in urls if _ELSEWHERE.match(url)]


class _Loads(HTMLParser):
    """Collects what a page loads, from here or from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        for name, value in given.items():
            name = name.removeprefix("xlink:")
            if name == "srcset":
                self.urls += [part.split()[0] for part in value.split(",") if part.strip()]
            elif (tag, name) in _LOADED:
                self.urls.append(value)
        if tag == "link" and not _NAMED_ONLY.intersection(given.get("rel", "").lower().split()):
            self.urls.append(given.get("href", ""))
        self.urls += _of_style(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.urls += _of_style(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self._in_style = False
