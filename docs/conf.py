"""How Sphinx builds these pages: ``make docs``.

Pages are plain Markdown that reads well where it lies. So the list of pages is kept here, and links to files that are
no pages become their text.
"""

import re
from pathlib import Path
from typing import Any

import jaxtensile

HERE = Path(__file__).parent
PAGES = {
    "Begin": ["tutorial", "howto", "guide", "frameworks"],
    "Use": ["exec", "tune", "jobs", "cluster", "reference", "glossary"],
    "Compare": ["numbers", "comparison"],
    "Explain": ["explanation/*", "xla", "faults", "simulation"],
    "Work on it": ["architecture", "threads", "modules", "switches", "constants", "decisions/*"],
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)(?:#[^)]*)?\)")

project, release = "jaxtensile", jaxtensile.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"jaxtensile {release}"
html_copy_source = False
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"


def prepared(_: Any, name: str, source: list[str]) -> None:
    page = HERE / f"{name}.md"

    def kept(link: re.Match[str]) -> str:
        target = (page.parent / link[2]).resolve()
        return link[0] if target.is_relative_to(HERE) and target.is_file() else link[1]

    source[0] = LINK.sub(kept, source[0])
    if name == "index":
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n:glob:\n\n" + "\n".join(names) + "\n```\n"
            for caption, names in PAGES.items()
        )


def setup(app: Any) -> None:
    app.connect("source-read", prepared)
