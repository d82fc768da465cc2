"""The documentation: every page is in the site's navigation, and every link leads somewhere. `make docs` builds it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import windowpane
from docs.site_hooks import PART, part

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_navigation_has_every_page_once() -> None:
    nav = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", _text(page))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {link}"


def test_the_front_page_begins_with_what_the_readme_promises() -> None:
    assert "What it is best at" in _text(DOCS / "index.md").partition("\n## ")[0]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    for path in named:
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__doc__, f"{path} has no docstring"
    assert {path.rpartition(".")[2] for path in named} == set(windowpane.__all__)


def _leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _leaves(value)


def _text(page: Path) -> str:
    """A page as the site shows it. The README's parts are written for the README's own place."""
    return PART.sub(lambda found: part(found.group(1)), page.read_text("utf-8"))


def _anchors(page: Path) -> set[str]:
    return {_slug(title) for title in re.findall(r"^#+ (.*)$", FENCE.sub("", _text(page)), re.MULTILINE)}


def _slug(title: str) -> str:
    """As Python-Markdown makes it of a heading."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
