"""What the site does besides rendering pages: parts of the README, which are written once, stand where pages name them.

`<!-- README: promises -->` is the part before the first section; another name is the section of that name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
PART = re.compile(r"<!-- README: (.*) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return PART.sub(lambda found: part(found.group(1)), markdown)


def part(name: str) -> str:
    """One part of the README without its heading, with links as they are from docs/."""
    first, *sections = README.read_text("utf-8").split("\n## ")
    parts = {section.partition("\n")[0]: section.partition("\n")[2] for section in sections}
    parts["promises"] = first.partition("\n")[2]
    return re.sub(r"\]\(docs/", "](", parts[name]).replace("](#models)", "](install.md#models)")
